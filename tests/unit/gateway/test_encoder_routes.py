"""Bodies of the encoders' routes as texts of jobs, and the forms of their answers."""

from __future__ import annotations

import base64
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from services.gateway.encoders.answers import (
    AcceptedTexts,
    AnsweredTexts,
    embedding_list,
    ranking,
    score_list,
)
from services.gateway.encoders.bodies import EmbeddingRequest, RerankRequest, ScoreRequest
from services.gateway.encoders.requests import (
    embedded_texts,
    encoder_jobs,
    ranked_pairs,
    scored_pairs,
)
from services.gateway.groups.job_group import JobGroup
from shardline.base.errors import Invalid
from shardline.contract.job import FinishReason, Result, Usage
from shardline.contract.request_parsing import parse_fields

ID = UUID(int=7)


def embedding(**fields: Any) -> EmbeddingRequest:
    return parse_fields({"model": "m", **fields}, EmbeddingRequest)


def rerank(**fields: Any) -> RerankRequest:
    return parse_fields({"model": "m", "query": "q", **fields}, RerankRequest)


def score(first: Any, second: Any) -> ScoreRequest:
    return parse_fields({"model": "m", "text_1": first, "text_2": second}, ScoreRequest)


class Model:
    """A registered model, as answers read it."""

    address = "m"


def answered(request: Any, *made: Any) -> Any:
    """The results of a request's texts: vectors or scores."""
    results = [
        Result(
            job_id=ID,
            text="",
            token_ids=(),
            usage=Usage(prompt_tokens=3, completion_tokens=0),
            finish_reason=FinishReason.STOP,
            exact=True,
            embedding=each if isinstance(each, tuple) else None,
            score=None if isinstance(each, tuple) else each,
        )
        for each in made
    ]
    group = JobGroup(job_ids=[ID] * len(made), is_repeatable=False)
    model: Any = Model()
    accepted = AcceptedTexts(name="x-1", request=request, model=model, group=group)
    return AnsweredTexts(accepted=accepted, results=results)


@pytest.mark.parametrize(
    ("given", "prompts", "names"),
    [
        ("a", ["a"], ["input"]),
        (["a", "b"], ["a", "b"], ["input[0]", "input[1]"]),
        ([5, 6], [(5, 6)], ["input"]),
        ([[5], [6, 7]], [(5,), (6, 7)], ["input[0]", "input[1]"]),
    ],
)
def test_each_form_of_an_input_is_its_texts(
    given: Any, prompts: list[Any], names: list[str]
) -> None:
    texts = embedded_texts(embedding(input=given))
    assert [each.prompt for each in texts] == prompts
    assert [each.names["prompt"] for each in texts] == names


@pytest.mark.parametrize("given", [["a", 5], [5, "a"], ["a"] * 2049])
def test_an_input_of_several_kinds_or_of_too_many_texts_is_refused(given: list[Any]) -> None:
    with pytest.raises(Invalid, match="input"):
        embedded_texts(embedding(input=given))


@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        ("a", "x", [("a", "x")]),
        ("a", ["x", "y"], [("a", "x"), ("a", "y")]),
        (["a"], ["x", "y"], [("a", "x"), ("a", "y")]),
        (["a", "b"], ["x", "y"], [("a", "x"), ("b", "y")]),
    ],
)
def test_texts_of_both_sides_are_paired(first: Any, second: Any, pairs: list[Any]) -> None:
    assert [(one.prompt, one.document) for one in scored_pairs(score(first, second))] == pairs


@pytest.mark.parametrize(("first", "second"), [(["a", "b"], ["x"]), (["a", "b"], "x")])
def test_sides_of_other_lengths_are_refused(first: Any, second: Any) -> None:
    with pytest.raises(Invalid, match="text_2: it needs one text for each"):
        scored_pairs(score(first, second))


def test_each_text_is_a_job_and_the_first_has_the_requests_id_and_key() -> None:
    request = embedding(input=["a", "b"], id=str(ID), idempotency_key="k", metadata={"n": 1})
    (_, first), (_, second) = encoder_jobs(request, embedded_texts(request))
    assert (first.id, first.idempotency_key, first.prompt) == (ID, "k", "a")
    assert second.id not in (None, ID)
    assert (second.idempotency_key, second.prompt, second.metadata) == (None, "b", {"n": 1})
    assert first.priority == 3


def test_an_error_names_the_text_as_the_body_has_it() -> None:
    request = embedding(input=["a", ""])
    with pytest.raises(Invalid) as refused:
        list(encoder_jobs(request, embedded_texts(request)))
    assert refused.value.field == "input[1]"


def test_vectors_are_numbers_or_their_bytes() -> None:
    vector = (0.5, -1.25)
    plain = embedding_list(answered(embedding(input="a"), vector))
    assert plain.data[0].embedding == vector
    assert (plain.usage.prompt_tokens, plain.usage.total_tokens) == (3, 3)
    packed = embedding_list(answered(embedding(input="a", encoding_format="base64"), vector))
    text = packed.data[0].embedding
    assert isinstance(text, str)
    assert np.frombuffer(base64.b64decode(text), "<f4").tolist() == list(vector)


def test_documents_come_by_their_scores() -> None:
    request = rerank(documents=["x", {"text": "y"}, "z"], top_n=2, return_documents=True)
    assert [each.document for each in ranked_pairs(request)] == ["x", "y", "z"]
    found = ranking(answered(request, 0.25, 0.75, 0.5)).results
    assert [(each.index, each.relevance_score) for each in found] == [(1, 0.75), (2, 0.5)]
    assert [getattr(each.document, "text", None) for each in found] == ["y", "z"]
    scores = score_list(answered(score("a", ["x", "y"]), 0.0, 0.5)).data
    assert [(each.index, each.score) for each in scores] == [(0, 0.0), (1, 0.5)]
