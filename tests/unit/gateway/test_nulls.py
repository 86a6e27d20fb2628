"""What is null in a request is left out, but not in what callers make up; and what a model once
refused to say is what it said."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.anthropic.requests import message_request
from services.gateway.openai.requests import chat_request
from services.gateway.responses.requests import response_request
from shardline.base.errors import Invalid
from shardline.contract.chat import Message
from shardline.contract.plain_json import MAX_LEVELS, without_nulls

USER = {"role": "user", "content": "a"}
NULLABLE = {"properties": {"a": {"enum": [None], "default": None}}}
CALL = {"id": "c-1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def test_a_field_that_is_null_is_left_out_at_any_depth() -> None:
    call = {**CALL, "later": None}
    assistant = {"role": "assistant", "content": None, "later": None, "tool_calls": [call]}
    tool = {"type": "function", "later": None, "function": {"name": "look", "strict": None}}
    messages = [{**USER, "name": None}, assistant, USER]
    told = chat_request({"model": "clerk", "messages": messages, "tools": [tool]})
    bare = [USER, {"role": "assistant", "tool_calls": [CALL]}, USER]
    tool = {"type": "function", "function": {"name": "look"}}
    asked = chat_request({"model": "clerk", "messages": bare, "tools": [tool]})
    assert (told.messages, told.tools) == (asked.messages, asked.tools)


def test_a_field_with_a_value_is_still_refused() -> None:
    with pytest.raises(Invalid, match=r"messages\[0\].later"):
        chat_request({"model": "clerk", "messages": [{**USER, "later": 0}]})


def test_a_null_in_what_is_the_callers_own_stays() -> None:
    block = {"type": "tool_use", "id": "c-1", "name": "look", "input": {"a": None}, "later": None}
    turns = [USER, {"role": "assistant", "content": [block]}, USER]
    tools = [{"name": "look", "input_schema": NULLABLE, "later": None}]
    request = message_request(
        {"model": "clerk", "max_tokens": 4, "messages": turns, "tools": tools}
    )
    (call,) = request.messages[1].tool_calls or ()
    assert call.function.arguments == '{"a":null}'
    assert request.tools[0].function.schema == NULLABLE


def test_a_whole_number_may_have_a_fraction_of_zero_in_a_response() -> None:
    numbers = {"max_output_tokens": 20.0, "top_logprobs": 2.0, "seed": 7.0, "temperature": 1}
    request = response_request({"model": "clerk", "input": "a", **numbers})
    assert (request.max_tokens, request.seed, request.asked.top_logprobs) == (20, 7, 2)
    assert isinstance(request.max_tokens, int)
    with pytest.raises(Invalid, match="max_output_tokens"):
        response_request({"model": "clerk", "input": "a", "max_output_tokens": 20.5})


def test_what_lies_too_deep_is_left_as_it_is() -> None:
    deep: Any = None
    for _ in range(10_000):
        deep = [deep]
    found = without_nulls(deep)
    for _ in range(MAX_LEVELS):
        deep, (found,) = deep[0], found
    assert found is deep


@pytest.mark.parametrize(
    "refusal",
    [
        {"content": None, "refusal": "no"},
        {"content": [{"type": "refusal", "refusal": "no"}]},
    ],
)
def test_a_refusal_is_what_the_model_said(refusal: dict[str, Any]) -> None:
    messages = [USER, {"role": "assistant", **refusal}, USER]
    request = chat_request({"model": "clerk", "messages": messages})
    assert request.messages[1] == Message("assistant", "no")
