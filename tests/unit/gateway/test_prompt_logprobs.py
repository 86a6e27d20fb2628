"""Log-probabilities of prompts in the answers of OpenAI's routes: vLLM's field, and those of an
echo."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import msgspec
import pytest

from services.gateway.openai.bodies import ChatCompletionRequest
from services.gateway.openai.requests import completion_request
from services.gateway.openai.responses import ChatResponses, CompletionResponses
from shardline.base.errors import Invalid
from shardline.contract.chat import Message
from shardline.contract.job import (
    MAX_PROMPT_LOGPROBS,
    FinishReason,
    PromptLogprob,
    Result,
    SamplingParams,
    TokenLogprob,
    Usage,
)
from tests.unit.gateway.test_openai_responses import HEAD, JOB_ID, tokens_of
from tests.unit.tokenize.small_tokenizers import byte_level, id_of

TOKENIZER = byte_level()
A, B, C = (id_of(TOKENIZER, letter) for letter in "abc")
PROMPT_LOGPROBS = (None, PromptLogprob(B, -2.0, 7, ((A, -0.5), (C, -1.0))))


def result(**fields: Any) -> Result:
    """The prompt is `ab`, the completion `c`."""
    usual: dict[str, Any] = {
        "job_id": uuid4(),
        "text": "c",
        "token_ids": (C,),
        "usage": Usage(prompt_tokens=2, completion_tokens=1),
        "finish_reason": FinishReason.LENGTH,
        "exact": True,
        "logprobs": (TokenLogprob(C, -0.25, ((C, -0.25),)),),
        "prompt_logprobs": PROMPT_LOGPROBS,
    }
    return Result(**{**usual, **fields})


def choice(fields: dict[str, Any], ended: Result) -> Any:
    """The one choice of a completion, as its caller reads it."""
    responses = CompletionResponses(
        head=HEAD,
        request=completion_request({"model": "m", "prompt": "ab", **fields}),
        tokens=tokens_of(TOKENIZER),
        prompt_ids=(A, B),
        job_id=JOB_ID,
    )
    return msgspec.to_builtins(responses.whole(ended))["choices"][0]


def test_an_echo_begins_with_the_prompts_log_probabilities() -> None:
    told = choice({"echo": True, "logprobs": 1}, result())

    assert told["text"] == "abc"
    assert told["logprobs"] == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [None, -2.0, -0.25],
        "top_logprobs": [None, {"a": -0.5, "b": -2.0}, {"c": -0.25}],
        "text_offset": [0, 1, 2],
    }


def test_vllms_field_has_ranks_and_texts_by_token_id() -> None:
    told = choice({"prompt_logprobs": 2}, result(logprobs=None))

    assert told["text"] == "c"
    assert told["logprobs"] is None
    assert told["prompt_logprobs"] == [
        None,
        {
            str(A): {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
            str(C): {"logprob": -1.0, "rank": 2, "decoded_token": "c"},
            str(B): {"logprob": -2.0, "rank": 7, "decoded_token": "b"},
        },
    ]


def test_a_chat_has_them_beside_its_choices() -> None:
    messages = (Message(role="user", content="ab"),)
    responses = ChatResponses(
        head=HEAD,
        request=ChatCompletionRequest(model="m", messages=messages, prompt_logprobs=0),
        tokens=tokens_of(TOKENIZER),
        prompt_ids=(A, B),
        job_id=JOB_ID,
    )

    told = msgspec.to_builtins(responses.whole(result()))

    assert told["prompt_logprobs"][0] is None
    assert told["prompt_logprobs"][1][str(B)]["rank"] == 7


def test_who_asks_for_none_gets_no_field() -> None:
    assert "prompt_logprobs" not in choice({"echo": True}, result(prompt_logprobs=None))


def test_a_result_of_an_earlier_release_has_none() -> None:
    told = choice({"echo": True, "logprobs": 1}, result(prompt_logprobs=None))

    assert told["prompt_logprobs"] is None
    assert told["logprobs"]["token_logprobs"] == [None, None, -0.25]


@pytest.mark.parametrize(
    ("fields", "num_top"),
    [
        ({"echo": True, "logprobs": 2}, 2),
        ({"echo": True, "logprobs": 2, "prompt_logprobs": 5}, 5),
        ({"echo": True, "logprobs": 0}, 0),
        ({"echo": True}, None),
        ({"logprobs": 2}, None),
        ({"prompt_logprobs": 3}, 3),
    ],
)
def test_an_echo_with_log_probabilities_asks_for_those_of_the_prompt(
    fields: dict[str, Any], num_top: int | None
) -> None:
    request = completion_request({"model": "m", "prompt": "ab", **fields})

    assert request.params().prompt_logprobs == num_top


@pytest.mark.parametrize(("num_tokens", "fits"), [(1560, True), (1561, False)])
def test_a_prompt_with_too_many_of_them_is_refused(num_tokens: int, fits: bool) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=20)
    tokens = tokens_of(TOKENIZER)
    assert (num_tokens * 21 <= MAX_PROMPT_LOGPROBS) == fits

    if fits:
        assert len(tokens.prepare(prompt=(A,) * num_tokens, params=params).prompt_ids) == num_tokens
    else:
        with pytest.raises(Invalid, match="1560 tokens"):
            tokens.prepare(prompt=(A,) * num_tokens, params=params)
