"""Custom tools: functions of one text in the job, any text at the door, there and back."""

from __future__ import annotations

import json
import random
from typing import Any
from uuid import UUID

import msgspec
import pytest

from services.gateway.responses.conversation import listed, messages_of
from services.gateway.responses.custom_tools import InputReader, arguments_of
from services.gateway.responses.events import CustomInputDelta, CustomInputDone, ResponseEvent
from services.gateway.responses.output import ResponseOutput, ToolNames
from services.gateway.responses.output_items import CustomCallItem, ListedCustomOutput
from services.gateway.responses.references import as_sent
from services.gateway.responses.requests import kept_items_of, response_request
from services.gateway.responses.tools import flat_choice, flat_tools
from shardline.base.errors import Invalid
from shardline.contract.chat import FunctionDefinition, Tool
from shardline.contract.job import MAX_TOKENS, SamplingParams
from shardline_server.replies import ReplyParser
from shardline_server.tokenize import Tokens
from tests.tiny_head import clerk_row

JOB = UUID(int=17)
SHELL: dict[str, Any] = {"type": "custom", "name": "shell", "description": "Runs a command."}
DATE: dict[str, Any] = {
    "type": "custom",
    "name": "date",
    "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]{4}|today"},
}
LOOK = {"type": "function", "name": "look"}
ASKED: dict[str, Any] = {"model": "clerk", "input": "a", "tools": [LOOK, SHELL, DATE]}
CALL = {"type": "custom_tool_call", "call_id": "c-1", "name": "shell", "input": 'ls "a"\n'}
OUTPUT = {"type": "custom_tool_call_output", "call_id": "c-1", "output": "done"}
TEXTS = ['ls "a"\n', "\\ / \b\f\n\r\t", "é 😀 \x7f \u2028", "", "*** Begin Patch\n+x = {1: 'a'}\n"]


def shown(request: Any) -> list[Any]:
    kept = request.asked.options()
    flat = flat_tools(request.tools, kept.namespaces, kept.descriptions, kept.custom_formats)
    return list(msgspec.to_builtins(flat))


def test_a_custom_tool_is_a_function_of_one_text_and_is_shown_as_it_came() -> None:
    request = response_request(ASKED)
    _, shell, date = (tool.function for tool in request.tools)
    assert shell.schema["required"] == ["input"]
    assert shell.schema["properties"] == {"input": {"type": "string"}}
    assert date.strict
    assert date.schema["properties"]["input"]["pattern"] == "^(?:[0-9]{4}|today)$"
    look, *custom = shown(request)
    assert look["type"] == "function"
    assert custom == [
        {**SHELL, "format": {"type": "text"}},
        {**DATE, "description": None},
    ]


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "name": "shell"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "custom", "name": "date"}, {"type": "function", "name": "look"}],
        },
    ],
)
def test_a_custom_tool_can_be_chosen(choice: dict[str, Any]) -> None:
    request = response_request({**ASKED, "tool_choice": choice})
    found = flat_choice(request.tool_choice, request.asked.options().custom_formats)
    assert msgspec.json.decode(msgspec.json.encode(found)) == choice


@pytest.mark.parametrize(
    ("tool", "field"),
    [
        ({**DATE, "format": {**DATE["format"], "syntax": "lark"}}, "tools[0].format.syntax"),
        ({**DATE, "format": {"type": "json"}}, "tools[0].format.type"),
        ({**SHELL, "name": "a b"}, "tools[0].name"),
        ({"type": "custom", "custom": {"name": "a"}}, "tools[0].name"),
    ],
)
def test_a_wrong_custom_tool_is_refused_by_name(tool: dict[str, Any], field: str) -> None:
    with pytest.raises(Invalid) as caught:
        response_request({**ASKED, "tools": [tool]})
    assert caught.value.field == field


def test_a_call_goes_through_a_conversation_with_its_text() -> None:
    request = response_request({**ASKED, "input": [{"role": "user", "content": "a"}, CALL, OUTPUT]})
    assert request.messages is not None
    _, called, told = request.messages
    (call,) = called.tool_calls or ()
    assert json.loads(call.function.arguments) == {"input": CALL["input"]}
    assert (told.role, told.tool_call_id, told.content) == ("tool", "c-1", "done")
    _, item, output = listed(JOB, kept_items_of(request.asked))
    assert isinstance(item, CustomCallItem)
    assert isinstance(output, ListedCustomOutput)
    assert messages_of([item])[0].tool_calls == (call,)
    assert messages_of([as_sent(item, 0), as_sent(output, 1)]) == (called, told)


def read(arguments: str, cuts: list[int]) -> str:
    reader = InputReader()
    pieces = [arguments[a:b] for a, b in zip([0, *cuts], [*cuts, len(arguments)], strict=True)]
    return "".join(map(reader.push, pieces)) + reader.end()


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("is_ascii", [True, False])
def test_the_text_is_read_however_its_json_arrives(text: str, *, is_ascii: bool) -> None:
    chance = random.Random(text)
    for written in (arguments_of(text), json.dumps({"input": text}, ensure_ascii=is_ascii)):
        for spaced in (written, written.replace('{"input": "', '{ "input" :  "')):
            for _ in range(30):
                cuts = sorted(chance.choices(range(len(spaced) + 1), k=chance.randrange(9)))
                assert read(spaced, cuts) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\ud83d b"}', "a� b"),
        ('{"input": "a\\ud83d\\u0041\\ud83d\\ud83d\\ude00b"}', "a�A�😀b"),
        ('{"input": "a", "b": "c"}', "a"),
        ('{"a": 1, "input": "b"}', "b"),
        ('{"command": "ls"}', '{"command": "ls"}'),
        ('"ls"', '"ls"'),
        ("ls", "ls"),
        ('{"input": "cut', "cut"),
        ('{"input": "cut\\u00', "cut"),
    ],
)
def test_other_arguments_lose_nothing(arguments: str, text: str) -> None:
    assert read(arguments, []) == text
    assert read(arguments, list(range(1, len(arguments)))) == text


def test_events_of_a_call_have_its_text_however_its_tokens_arrive() -> None:
    tokens = Tokens.from_row(clerk_row())
    tool = Tool(function=FunctionDefinition(name="shell", parameters={"type": "object"}))
    reply = f'<tool_call>\n{{"name": "shell", "arguments": {arguments_of(TEXTS[0])}}}\n</tool_call>'
    ids = tokens.tokenizer.encode(reply).ids

    def events(size: int) -> list[ResponseEvent]:
        made = ResponseOutput(
            JOB,
            completion=tokens.completion(SamplingParams(), MAX_TOKENS, (1,)),
            replies=ReplyParser("hermes", job_id=JOB, tools=[tool]),
            tools=ToolNames(custom={"shell"}),
        )
        found: list[ResponseEvent] = []
        for start in range(0, len(ids), size):
            found += made.push(ids[start : start + size])
        found += made.end("completed")
        (item,) = made.items
        assert isinstance(item, CustomCallItem)
        assert (item.id, item.status, item.input) == (f"ctc_{JOB}_0", "completed", TEXTS[0])
        return found

    once = events(len(ids))
    assert all(events(size) == once for size in (1, 3, 7))
    assert "".join(one.delta for one in once if isinstance(one, CustomInputDelta)) == TEXTS[0]
    assert [one.input for one in once if isinstance(one, CustomInputDone)] == [TEXTS[0]]
