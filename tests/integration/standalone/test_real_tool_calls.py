"""Tools with OpenAI's own client and a model with trained weights, which was never trained to call
one: calls that must be made are valid, streamed as they are whole, and the same after a death."""

from __future__ import annotations

import json
import os
import re
import signal
from typing import Any, cast
from uuid import UUID

import pytest
from anthropic import Anthropic
from anthropic.types import ToolUseBlock
from openai import OpenAI
from openai.types.chat import ChatCompletion

from shardline.client import Client
from tests.real_model import NAME
from tests.stack import Stack

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 40},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {
            "type": "object",
            "properties": {"hours_ahead": {"type": "integer", "minimum": 0, "maximum": 24}},
            "required": ["hours_ahead"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ASKED: Any = [{"role": "user", "content": "What is the weather in Rome?"}]


@pytest.fixture(scope="module")
def stack(real_stack: Stack) -> Stack:
    return real_stack


def fields(choice: Any, seed: int) -> dict[str, Any]:
    return {
        "model": NAME,
        "messages": ASKED,
        "tools": [WEATHER, CLOCK],
        "tool_choice": choice,
        "temperature": 1.0,
        "seed": seed,
        "max_tokens": 400,
    }


def check_call(name: str, arguments: str) -> None:
    """Checks a call by the schema of its tool."""
    found = json.loads(arguments)
    if name == "get_weather":
        assert set(found) == {"city", "unit"}
        assert found["unit"] in ("celsius", "fahrenheit")
    else:
        assert name == "get_time"
        assert 0 <= found["hours_ahead"] <= 24


def calls_of(answer: ChatCompletion) -> list[tuple[str, str, str]]:
    found: Any = answer.choices[0].message.tool_calls or []
    return [(call.id, call.function.name, call.function.arguments) for call in found]


def streamed(openai: OpenAI, **asked: Any) -> tuple[str, list[tuple[str, str, str]], str | None]:
    """Returns content, calls and finish reason of a stream, as a client puts them together."""
    calls: list[list[str]] = []
    content = ""
    reason = None
    for chunk in openai.chat.completions.create(**asked, stream=True):
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            assert call.function is not None
            if call.id:
                assert call.index == len(calls)
                calls.append([call.id, call.function.name or "", ""])
            calls[call.index][2] += call.function.arguments or ""
        reason = choice.finish_reason or reason
    return content, [(one[0], one[1], one[2]) for one in calls], reason


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_that_must_be_made_is_valid_and_streamed_as_it_is_whole(
    openai: OpenAI, choice: Any
) -> None:
    for seed in range(2):
        asked = {**fields(choice, seed), "parallel_tool_calls": seed > 0}
        whole = openai.chat.completions.create(**asked)
        calls = calls_of(whole)
        content, deltas, reason = streamed(openai, **asked)

        assert calls, whole
        assert len(calls) == 1 or (choice == "required" and seed > 0)
        for _, name, arguments in calls:
            check_call(name, arguments)
            assert name == "get_weather" or choice == "required"
        assert whole.choices[0].message.content is None
        assert (whole.choices[0].finish_reason, reason, content) == ("tool_calls",) * 2 + ("",)
        assert [call[1:] for call in deltas] == [call[1:] for call in calls]


def test_a_conversation_goes_on_with_the_answers_message_and_the_tools_answer(
    openai: OpenAI,
) -> None:
    whole = openai.chat.completions.create(**fields(NAMED, 7))
    message = whole.choices[0].message
    (call,) = message.tool_calls or []
    asked = [
        *ASKED,
        message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees."},
    ]
    answer = openai.chat.completions.create(
        **{**fields("none", 7), "messages": asked, "max_tokens": 16, "temperature": 0}
    )

    assert answer.choices[0].message.content
    assert not answer.choices[0].message.tool_calls


def test_a_custom_tools_text_is_one_that_its_regex_matches(openai: OpenAI) -> None:
    order = {"type": "grammar", "syntax": "regex", "definition": r"(add|del) \"[a-z]{1,8}\"\n"}
    asked: dict[str, Any] = {
        "model": NAME,
        "input": "Add a cat.",
        "tools": [{"type": "custom", "name": "edit", "description": "Edits.", "format": order}],
        "tool_choice": {"type": "custom", "name": "edit"},
        "max_output_tokens": 400,
        "extra_body": {"seed": 3},
    }
    whole = openai.responses.create(**asked)
    (call,) = whole.output
    assert call.type == "custom_tool_call"
    assert re.fullmatch(order["definition"], call.input)
    with openai.responses.stream(**asked) as stream:
        events = list(stream)
        (streamed_call,) = stream.get_final_response().output
    deltas = [one.delta for one in events if one.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == call.input
    assert len(deltas) > 1
    assert streamed_call.type == "custom_tool_call"
    assert streamed_call.input == call.input

    told = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done."}
    again = {**asked, "tool_choice": "none", "max_output_tokens": 8}
    for more in (
        {"input": [told], "previous_response_id": whole.id},
        {"input": [call.model_dump(), told]},
    ):
        assert openai.responses.create(**{**again, **more}).output_text


def test_other_apis_of_the_same_gateway_have_valid_calls_too(stack: Stack, openai: OpenAI) -> None:
    function = WEATHER["function"]
    schema = function["parameters"]
    gateway = stack.urls["gateway"]
    with Anthropic(base_url=gateway, api_key=stack.urls["api_key"]) as anthropic:
        for choice in ({"type": "tool", "name": "get_weather"}, {"type": "any"}):
            message = anthropic.messages.create(
                model=NAME,
                max_tokens=400,
                messages=ASKED,
                tools=[{"name": "get_weather", "input_schema": schema}],
                tool_choice=cast(Any, choice),
                extra_body={"seed": 3},
            )
            uses = [block for block in message.content if isinstance(block, ToolUseBlock)]
            assert message.stop_reason == "tool_use", message
            for use in uses:
                check_call(use.name, json.dumps(use.input))
    response = openai.responses.create(
        model=NAME,
        input="What is the weather in Rome?",
        tools=cast(Any, [{"type": "function", **function, "strict": True}]),
        tool_choice={"type": "function", "name": "get_weather"},
        max_output_tokens=400,
        extra_body={"seed": 3},
    )
    called = [item for item in response.output if item.type == "function_call"]
    assert called, response
    for item in called:
        check_call(item.name, item.arguments)


def test_calls_are_in_the_row_at_every_door_and_stay_after_the_death_of_the_head(
    stack: Stack, openai: OpenAI
) -> None:
    with Client(database_url=stack.urls["database"], redis_url=stack.urls["redis"]) as client:
        asked = {**fields("required", 11), "messages": ASKED}
        calm = client.wait(client.submit(**asked), timeout_s=120)
        stream = openai.chat.completions.create(**fields("required", 11), stream=True)
        parts = ""
        job_id = None
        for chunk in stream:
            if job_id is None:
                job_id = UUID(chunk.id.removeprefix("chatcmpl-"))
            for delta in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
                if not parts:
                    os.kill(stack.look()["processes"]["stage-0"], signal.SIGKILL)
                assert delta.function is not None
                parts += f"{delta.function.name or ''}{delta.function.arguments or ''}"
        assert job_id is not None
        killed = client.get(job_id)

    assert calm.result is not None
    assert killed.result is not None
    assert calm.result.tool_calls
    assert killed.result.token_ids == calm.result.token_ids
    assert killed.result.text == calm.result.text
    functions = [call.function for call in killed.result.tool_calls]
    assert functions == [call.function for call in calm.result.tool_calls]
    assert parts == "".join(f"{one.name}{one.arguments}" for one in functions)
    assert killed.fence > 1, "the head died in the middle"
