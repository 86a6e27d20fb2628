"""OpenAI's bodies: each field is taken, dropped because it changes nothing, or refused by its name
with a remedy."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.http.json_body import read_object
from services.gateway.openai.choice_requests import chat_choices, completion_choices
from services.gateway.openai.neutral_fields import CHAT_NEUTRAL, COMPLETION_NEUTRAL
from services.gateway.openai.requests import chat_request, completion_request
from services.gateway.responses.requests import response_request
from shardline.base.errors import Invalid
from shardline.contract.chat import Message
from shardline.contract.choices import choice_seed


def nested(depth: int) -> list[Any]:
    """A list in a list in a list."""
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


TEXT: dict[str, Any] = {"model": "clerk", "prompt": "a"}
CHAT: dict[str, Any] = {"model": "clerk", "messages": [{"role": "user", "content": "a"}]}
RESPONSE: dict[str, Any] = {"model": "clerk", "input": "a"}


def test_the_fields_of_a_completion_become_ours() -> None:
    fields = {
        "max_tokens": 3,
        "stop": "x",
        "temperature": 0,
        "logprobs": 2,
        "seed": 5,
        "stream": True,
    }
    request = completion_request({**TEXT, **fields, "stream_options": {"include_usage": True}})
    assert (request.prompt, request.max_tokens, request.stop, request.temperature) == (
        "a",
        3,
        ("x",),
        0,
    )
    assert (request.logprobs, request.seed) == (2, 5)
    assert (request.stream, request.stream_options.include_usage) == (True, True)


def test_the_messages_of_a_chat_become_ours() -> None:
    messages = [
        {
            "role": "system",
            "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}],
        },
        {"role": "assistant", "content": "d", "tool_calls": None, "refusal": None},
        {"role": "user", "content": "e", "name": "me"},
    ]
    request = chat_request(
        {**CHAT, "messages": messages, "max_completion_tokens": 4, "logprobs": True}
    )
    assert request.messages == (
        Message("system", "b\nc"),
        Message("assistant", "d"),
        Message("user", "e", "me"),
    )
    assert (request.params().max_tokens, request.params().logprobs) == (4, 0)


@pytest.mark.parametrize("kind", ["message", "text"])
def test_the_type_of_a_message_changes_nothing(kind: str) -> None:
    (message,) = CHAT["messages"]
    assert chat_request({**CHAT, "messages": [{**message, "type": kind}]}).messages == (
        Message(role="user", content="a"),
    )
    for fields in (
        {"messages": [{**message, "type": "image"}]},
        {"tools": [{"type": kind, "function": {"name": "look"}}]},
    ):
        with pytest.raises(Invalid) as caught:
            chat_request({**CHAT, **fields})
        assert caught.value.field.endswith("[0].type")


def test_prompts_times_n_are_choices_with_one_id_and_seeds_that_follow() -> None:
    key = {"idempotency_key": "k", "seed": 5}
    choices = completion_choices({**TEXT, "prompt": ["a", [3, 4]], "n": 2, "best_of": 2, **key})
    assert [choice.prompt for choice in choices] == ["a", "a", (3, 4), (3, 4)]
    assert [choice.idempotency_key for choice in choices] == ["k", None, None, None]
    seeds = [choice.seed for choice in choices]
    assert seeds == [5, choice_seed(5, 1), 5, choice_seed(5, 1)]
    assert seeds[0] != seeds[1]
    assert len({choice.id for choice in choices}) == 4
    assert [choice.seed for choice in chat_choices({**CHAT, "n": 2})] == [None, None]


def test_a_service_tier_is_a_priority_unless_the_request_names_one() -> None:
    tiers = ("auto", "default", "flex", "priority", "fast")
    for parse, fields in ((chat_request, CHAT), (response_request, RESPONSE)):
        found = [parse({**fields, "service_tier": tier}).priority for tier in tiers]
        assert found == [3, 3, 5, 1, 1]
        assert parse({**fields, "service_tier": "flex", "priority": 2}).priority == 2


def test_a_hint_changes_no_request() -> None:
    hints = {
        "prediction": {"type": "content", "content": "a"},
        "prompt_cache_options": {"ttl": "30m"},
        "prompt_cache_key": "k",
        "safety_identifier": "s",
    }
    assert chat_request({**CHAT, **hints}) == chat_request(CHAT)


@pytest.mark.parametrize(
    ("fields", "field", "remedy"),
    [
        ({"n": 0}, "n", "docs/jobs.md"),
        ({"n": 129}, "n", "docs/jobs.md"),
        ({"n": True}, "n", "docs/jobs.md"),
        ({"best_of": 3}, "best_of", "send 1"),
        ({"echo": True, "logprobs": 0, "stream": True}, "echo", "Leave out stream"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "Leave out stream"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "docs/jobs.md"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "docs/jobs.md"),
        ({"use_beam_search": True}, "use_beam_search", "send false"),
        ({"length_penalty": 2.0}, "length_penalty", "send 1.0"),
        ({"best_of": 3, "n": 2}, "best_of", "send 1"),
        ({"best_of": True}, "best_of", "send 1"),
        ({"service_tier": "faster"}, "service_tier", "docs/jobs.md"),
        ({"store": "yes"}, "store", "send false"),
        ({"suffix": "x"}, "suffix", "Leave it out"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "docs/jobs.md"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "docs/jobs.md"),
        ({"logit_bias": {str(one): 1 for one in range(1025)}}, "logit_bias", "docs/jobs.md"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "docs/jobs.md"),
        ({"allowed_token_ids": [0] * 1025}, "allowed_token_ids", "docs/jobs.md"),
        ({"bad_words": [""]}, "bad_words[0]", "docs/jobs.md"),
        ({"bad_words": ["a"] * 65}, "bad_words", "docs/jobs.md"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1 for all"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "docs/jobs.md"),
        ({"add_generation_prompt": False}, "add_generation_prompt", "Send messages"),
        ({"user": 5}, "user", "any text"),
        ({"prompt": ["a", 5]}, "prompt[1]", "docs/jobs.md"),
        ({"prompt": ["a", ""]}, "prompt[1]", "Send some text"),
        ({"prompt": ["", "a"]}, "prompt", "Send some text"),
        ({"prompt": [[1], [2, "a"]]}, "prompt[1][1]", "docs/jobs.md"),
        ({"prompt": ["a"] * 513}, "prompt", "several requests"),
        ({"prompt": ["a"] * 5, "n": 128}, "prompt", "several requests"),
        ({"prompt": []}, "prompt", "Send some text"),
        ({"prompt": None}, "prompt", "docs/jobs.md"),
        ({"prompt": [1, "a"]}, "prompt[1]", "docs/jobs.md"),
        ({"prompt": 5}, "prompt", "docs/jobs.md"),
        ({"messages": []}, "messages", "/v1/chat/completions"),
        ({"stream": "yes"}, "stream", "docs/jobs.md"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "Set stream"),
        ({"stream_options": {"continuous_usage_stats": True}}, "stream_options", "Set stream"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "docs/jobs.md"),
        ({"stream": True, "stream_options": 3}, "stream_options", "docs/jobs.md"),
        ({"return_token_ids": 1}, "return_token_ids", "docs/jobs.md"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "one of"),
        ({"temperature": 3}, "temperature", "docs/jobs.md"),
        ({"top_p": -0.1}, "top_p", "docs/jobs.md"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty", "docs/jobs.md"),
        ({"top_k": 2**64}, "top_k", "docs/jobs.md"),
        ({"max_tokens": 0}, "max_tokens", "Send more"),
        ({"max_tokens": 5.5}, "max_tokens", "docs/jobs.md"),
        ({"max_completion_tokens": -2}, "max_completion_tokens", "docs/jobs.md"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens", "Lower it"),
        ({"traceparent": "any text"}, "traceparent", "docs/jobs.md"),
        ({"stop": ["a"] * 17}, "stop", "docs/jobs.md"),
        ({"logprobs": 21}, "logprobs", "docs/jobs.md"),
        ({"max_token": 3}, "max_token", "docs/jobs.md"),
        ({"guided_choice": ["a"]}, "guided_choice", "structured_outputs: {choice: …}"),
        ({"ebnf": "root ::= [a-z]"}, "ebnf", "structured_outputs: {grammar: …}"),
        ({"priority": 10}, "priority", "docs/jobs.md"),
        ({"model": None}, "model", "docs/jobs.md"),
    ],
)
def test_a_wrong_completion_names_the_field_and_the_remedy(
    fields: dict[str, Any], field: str, remedy: str
) -> None:
    with pytest.raises(Invalid) as caught:
        completion_choices({**TEXT, **fields})
    assert caught.value.field == field
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [{}]}, "tools[0].function"),
        ({"tools": nested(960)}, "tools[0]"),
        ({"functions": []}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"suffix": nested(10_000)}, "suffix"),
        ({"verbosity": "low"}, "verbosity"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"echo": True}, "echo"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"audio": {}}, "audio"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"prompt": "a"}, "prompt"),
        ({"messages": None}, "messages"),
        ({"messages": "a"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["a"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a", "mood": "b"}]}, "messages[0].mood"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].id",
        ),
    ],
)
def test_a_wrong_chat_names_the_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(Invalid) as caught:
        chat_request({**CHAT, **fields})
    assert caught.value.field == field


@pytest.mark.parametrize(
    "fields",
    [
        *({name: value} for name, values in CHAT_NEUTRAL.items() for value in values),
        *({name: None} for name in CHAT_NEUTRAL),
        {"top_k": -1},
        {"seed": -1},
        {"stop": ""},
        {"stop": []},
        {"max_tokens": -1},
        {"max_completion_tokens": -1},
        {"top_logprobs": 0},
        {"stream_options": {}},
        {"stream_options": {"include_usage": None, "include_obfuscation": False}},
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        {"n": 1.0},
        {"presence_penalty": None, "temperature": None, "logprobs": None, "metadata": None},
        {
            "stream": True,
            "stream_options": {"include_usage": False, "continuous_usage_stats": False},
        },
    ],
)
def test_what_changes_nothing_is_taken_as_if_it_were_left_out(fields: dict[str, Any]) -> None:
    plain = chat_request(CHAT)
    request = chat_request({**CHAT, **fields})
    assert (request.params(), request.metadata) == (plain.params(), plain.metadata)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}},
        {"prompt_cache_retention": "24h"},
        {"reasoning": {"context": "auto", "mode": "standard", "summary": "auto"}},
        {"text": {"verbosity": "medium"}},
    ],
)
def test_what_changes_nothing_of_a_response_is_taken_too(fields: dict[str, Any]) -> None:
    plain = response_request(RESPONSE)
    request = response_request({**RESPONSE, **fields})
    assert (request.params(), request.messages) == (plain.params(), plain.messages)


@pytest.mark.parametrize(
    ("biases", "key"),
    [
        ({"5": 1, "a b": 1}, "a b"),
        ({"5": 1, "-1": 1}, "-1"),
        ({"5": 1, "6": 101}, "6"),
        ({"x" * 100: 1}, "x" * 60),
    ],
)
def test_a_wrong_entry_is_named_by_its_key(biases: dict[str, float], key: str) -> None:
    with pytest.raises(Invalid) as refused:
        chat_request({**CHAT, "logit_bias": biases})
    assert refused.value.field == "logit_bias"
    assert key in refused.value.problem
    assert len(refused.value.problem) < 200


@pytest.mark.parametrize(
    "fields", [{name: value} for name, values in COMPLETION_NEUTRAL.items() for value in values]
)
def test_what_changes_nothing_of_a_completion_is_taken_too(fields: dict[str, Any]) -> None:
    assert completion_request({**TEXT, **fields}) == completion_request(TEXT)


def test_whole_numbers_are_integers_however_a_language_writes_them() -> None:
    request = chat_request({**CHAT, "max_tokens": 5.0, "seed": 7.0, "top_k": 3.0, "priority": 2.0})
    assert (request.max_tokens, request.seed, request.top_k, request.priority) == (5, 7, 3, 2)


@pytest.mark.parametrize(
    ("fields", "length", "max_tokens"),
    [
        ({"max_tokens": None}, None, None),
        ({"max_tokens": 5}, 5, 5),
        ({"max_completion_tokens": 5, "max_tokens": 5}, 5, 5),
        ({"max_tokens": -1, "min_tokens": 9}, -1, None),
    ],
)
def test_no_length_is_told_from_no_limit(
    fields: dict[str, Any], length: int | None, max_tokens: int | None
) -> None:
    request = completion_request({**TEXT, **fields})
    assert (request.length, request.params().max_tokens) == (length, max_tokens)


def test_variables_of_a_chats_template_are_kept_and_a_prompt_has_none() -> None:
    kept = chat_request({**CHAT, "chat_template_kwargs": {"enable_thinking": False}})
    assert kept.chat_template_kwargs == {"enable_thinking": False}
    assert chat_request({**CHAT, "chat_template_kwargs": {}}) == chat_request(CHAT)
    with pytest.raises(Invalid) as caught:
        completion_request({**TEXT, "chat_template_kwargs": {"enable_thinking": False}})
    assert caught.value.field == "chat_template_kwargs"


def test_a_long_name_is_cut_in_the_error() -> None:
    with pytest.raises(Invalid) as caught:
        chat_request({**CHAT, "x" * 100_000: 1})
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("body", "field", "problem"),
    [
        (
            rb'{"messages": [{"role": "user", "content": "cut \ud83d here"}]}',
            "messages[0].content",
            "lone surrogate",
        ),
        (rb'{"prompt": "cut \ud83d"}', "prompt", "lone surrogate"),
        (rb'{"metadata": {"a": [0, 1e5000]}}', "metadata.a[1]", "JSON has not"),
        (rb'{"temperature": NaN}', "temperature", "JSON has not"),
    ],
)
def test_what_json_cannot_say_is_named_by_its_field(body: bytes, field: str, problem: str) -> None:
    with pytest.raises(Invalid) as caught:
        read_object(body)
    assert caught.value.field == field
    assert problem in caught.value.problem


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'"a"', b"\xff{}"])
def test_a_body_that_is_not_an_object_is_refused(body: bytes) -> None:
    with pytest.raises(Invalid) as caught:
        read_object(body)
    assert caught.value.field == "body"
