"""Bodies of the encoders' routes as jobs, one for each text or pair. Knows no server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from services.gateway.encoders.bodies import (
    MAX_TEXTS,
    EmbeddingRequest,
    EncoderRequest,
    RerankDocument,
    RerankRequest,
    ScoreRequest,
)
from services.gateway.field_names import renaming
from shardline.base.errors import Invalid
from shardline.contract.ids import new_id
from shardline.contract.job import JobRequest, Prompt
from shardline.contract.request_parsing import check_request

OWN = ("prompt", "messages", "question", "document", "id", "idempotency_key")


@dataclass(frozen=True, slots=True)
class TextOfRequest:
    """What one job reads, and how errors name it: a job's fields by the body's."""

    prompt: Prompt
    document: str | None
    names: Mapping[str, str]


def embedded_texts(request: EmbeddingRequest) -> list[TextOfRequest]:
    """The texts of `input` in their order. Raises Invalid."""
    given = request.input
    if isinstance(given, str):
        return [TextOfRequest(given, None, {"prompt": "input"})]
    if isinstance(given[0], int):
        ids = tuple(each for each in given if isinstance(each, int))
        if len(ids) < len(given):
            raise Invalid("input", "it mixes token ids and texts", "Send one kind")
        return [TextOfRequest(ids, None, {"prompt": "input"})]
    _check_number("input", len(given))
    texts: list[TextOfRequest] = []
    for place, each in enumerate(given):
        if isinstance(each, int):
            raise Invalid(f"input[{place}]", "it mixes token ids and texts", "Send one kind")
        texts.append(TextOfRequest(each, None, {"prompt": f"input[{place}]"}))
    return texts


def ranked_pairs(request: RerankRequest) -> list[TextOfRequest]:
    """The query with each document."""
    return [
        TextOfRequest(
            request.query,
            each.text if isinstance(each, RerankDocument) else each,
            {"prompt": "query", "document": f"documents[{place}]"},
        )
        for place, each in enumerate(request.documents)
    ]


def scored_pairs(request: ScoreRequest) -> list[TextOfRequest]:
    """Each text of one side with its partner of the other; one text alone has all of them. Raises
    Invalid."""
    first, second = request.text_1, request.text_2
    if isinstance(first, str) and isinstance(second, str):
        return [TextOfRequest(first, second, {"prompt": "text_1", "document": "text_2"})]
    is_one = isinstance(first, str) or len(first) == 1
    if isinstance(second, str) or (not is_one and len(first) != len(second)):
        problem = "it needs one text for each of text_1, or text_1 one text"
        raise Invalid("text_2", problem, "Send lists of equal length, or one text first")
    lefts = repeat(first if isinstance(first, str) else first[0]) if is_one else iter(first)
    return [
        TextOfRequest(
            left,
            right,
            {
                "prompt": "text_1" if is_one else f"text_1[{place}]",
                "document": f"text_2[{place}]",
            },
        )
        for place, (left, right) in enumerate(zip(lefts, second, strict=False))
    ]


def encoder_jobs(
    request: EncoderRequest, texts: list[TextOfRequest]
) -> Iterator[tuple[TextOfRequest, JobRequest]]:
    """Yields one job for each text; the first has the request's id and key. Raises Invalid."""
    shared: dict[str, Any] = {
        name: getattr(request, name) for name in JobRequest.__struct_fields__ if name not in OWN
    }
    for place, text in enumerate(texts):
        job = JobRequest(
            **shared,
            prompt=text.prompt,
            document=text.document,
            id=new_id() if place or request.id is None else request.id,
            idempotency_key=None if place else request.idempotency_key,
        )
        with renaming(text.names):
            yield text, check_request(job)


def _check_number(field: str, num: int) -> None:
    if num > MAX_TEXTS:
        problem = f"it holds {num} texts; {MAX_TEXTS} is the limit"
        raise Invalid(field, problem, "Send them in several requests")
