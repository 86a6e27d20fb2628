"""OpenAI's bodies: each field is taken, dropped because it changes nothing, or refused by its name with a remedy."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.json_body import read_object
from services.gateway.openai import AnswerOptions, chat_request, completion_request
from shardline.errors import Invalid
from shardline.job import Message

TEXT: dict[str, Any] = {"model": "clerk", "prompt": "a"}
CHAT: dict[str, Any] = {"model": "clerk", "messages": [{"role": "user", "content": "a"}]}


def test_the_fields_of_a_completion_become_ours() -> None:
    fields = {"max_tokens": 3, "stop": "x", "temperature": 0, "logprobs": 2, "seed": 5, "stream": True}
    request, wanted = completion_request({**TEXT, **fields, "stream_options": {"include_usage": True}})
    assert (request.prompt, request.max_tokens, request.stop, request.temperature) == ("a", 3, ("x",), 0)
    assert (request.logprobs, request.seed) == (2, 5)
    assert wanted == AnswerOptions(stream=True, include_usage=True)


def test_the_messages_of_a_chat_become_ours() -> None:
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": "d", "tool_calls": None, "refusal": None},
        {"role": "user", "content": "e", "name": "me"},
    ]
    request, _ = chat_request({**CHAT, "messages": messages, "max_completion_tokens": 4, "logprobs": True})
    assert request.messages == (Message("system", "bc"), Message("assistant", "d"), Message("user", "e", "me"))
    assert (request.max_tokens, request.logprobs) == (4, 0)


@pytest.mark.parametrize(
    ("fields", "field", "remedy"),
    [
        ({"n": 2}, "n", "send 1"),
        ({"n": True}, "n", "send 1"),
        ({"best_of": 3}, "best_of", "send 1"),
        ({"echo": True}, "echo", "send false"),
        ({"suffix": "x"}, "suffix", "Leave it out"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "send {}"),
        ({"user": 5}, "user", "any text"),
        ({"prompt": ["a", "b"]}, "prompt", "one request for each"),
        ({"prompt": []}, "prompt", "Send some text"),
        ({"prompt": None}, "prompt", "Send one of the two"),
        ({"prompt": [1, "a"]}, "prompt[1]", "docs/jobs.md"),
        ({"prompt": 5}, "prompt", "docs/jobs.md"),
        ({"messages": []}, "messages", "/v1/chat/completions"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"stream_options": {}}, "stream_options", "Set stream"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "include_usage"),
        ({"stream": True, "stream_options": 3}, "stream_options", "include_usage"),
        ({"return_token_ids": 1}, "return_token_ids", "true or false"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "one of"),
        ({"temperature": 3}, "temperature", "docs/jobs.md"),
        ({"top_p": 0}, "top_p", "docs/jobs.md"),
        ({"stop": ["a"] * 17}, "stop", "docs/jobs.md"),
        ({"logprobs": 21}, "logprobs", "docs/jobs.md"),
        ({"max_token": 3}, "max_token", "docs/jobs.md"),
        ({"priority": 10}, "priority", "docs/jobs.md"),
        ({"model": None}, "model", "docs/jobs.md"),
    ],
)
def test_a_wrong_completion_names_the_field_and_the_remedy(fields: dict[str, Any], field: str, remedy: str) -> None:
    with pytest.raises(Invalid) as caught:
        completion_request({**TEXT, **fields})
    assert caught.value.field == field
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [{}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"audio": {}}, "audio"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"prompt": "a"}, "prompt"),
        ({"messages": None}, "messages"),
        ({"messages": "a"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["a"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a", "mood": "b"}]}, "messages[0].mood"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ],
)
def test_a_wrong_chat_names_the_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(Invalid) as caught:
        chat_request({**CHAT, **fields})
    assert caught.value.field == field


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'"a"', b"\xff{}"])
def test_a_body_that_is_not_an_object_is_refused(body: bytes) -> None:
    with pytest.raises(Invalid) as caught:
        read_object(body)
    assert caught.value.field == "body"
