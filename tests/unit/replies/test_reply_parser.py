"""What a parser takes for a call, when it tells it, and what becomes of the rest."""

from __future__ import annotations

import json
import uuid

import pytest

from shardline.base.errors import Invalid
from shardline.contract.chat import FunctionDefinition, Reply, Tool
from shardline_server.replies import FAMILIES, ReplyParser, family_of, joined, parse

JOB_ID = uuid.UUID(int=4711)
PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "near": {"type": ["number", "null"]},
    "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    "places": {"$ref": "#/$defs/places"},
}
TOOLS = [
    Tool(
        function=FunctionDefinition(
            name="weather",
            parameters={"properties": PROPERTIES, "$defs": {"places": {"type": "array"}}},
        )
    )
]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'


def reply_of(text: str, family: str = "hermes", *, tells_early: bool = False) -> Reply:
    return parse(text, family, job_id=JOB_ID, tools=TOOLS, tells_early=tells_early)


def arguments_of(reply: Reply) -> list[object]:
    return [json.loads(call.function.arguments) for call in reply.tool_calls]


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "wind", "arguments": {}}',
        '{"name": "weather", "arguments": {"city": Rome}}',
        '{"name": "weather", "arguments": ["Rome"]}',
        '{"name": 1, "arguments": {}}',
        '{"arguments": {}}',
        "weather",
        "",
    ],
)
def test_what_is_no_call_is_content_with_its_markers(body: str) -> None:
    text = f"Look: <tool_call>{body}</tool_call> done"

    assert reply_of(text) == Reply(content=text)


def test_without_tools_nothing_is_a_call() -> None:
    assert parse(CALL, "hermes", job_id=JOB_ID) == Reply(content=CALL)


@pytest.mark.parametrize("size", range(1, len(CALL)))
def test_a_call_that_is_cut_off_is_neither_call_nor_content(size: int) -> None:
    reply = reply_of(f"One moment.\n{CALL}\n{CALL[:size]}")

    content = "One moment." if size >= len("<tool_call>") else f"One moment.\n{CALL[:size]}"
    assert reply.content == content
    assert arguments_of(reply) == [{"city": "Rome"}]


def test_text_around_calls_is_content() -> None:
    reply = reply_of(f"One moment.\n{CALL}\nAnd{CALL} there.\n")

    assert reply.content == "One moment.\nAnd there.\n"
    assert arguments_of(reply) == [{"city": "Rome"}] * 2


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"arguments": {"city": "Rome"}, "name": "weather"}', {"city": "Rome"}),
        ('{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}', {"city": "Rome"}),
        ('{"name": "weather", "arguments": null}', {}),
        ('{"name": "weather"}', {}),
        ('{"name": "weather", "arguments": {"city": "a\nb"}}', {"city": "a\nb"}),
        ('{"name": "weather", "arguments": {"city": "R", "city": "S"}}', {"city": "S"}),
        (
            '{"name": "weather", "arguments": {"city": "\\u00e9</tool_call>}"}}',
            {"city": "é</tool_call>}"},
        ),
        ('{"name": "weather", "arguments": {"city": {"a": [{}]}}}', {"city": {"a": [{}]}}),
    ],
)
def test_arguments_are_one_json_object(body: str, arguments: object) -> None:
    (call,) = reply_of(f"<tool_call>{body}</tool_call>").tool_calls

    assert json.loads(call.function.arguments) == arguments
    assert call.function.arguments.count("city") <= 1


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("city", "12", "12"),
        ("city", " Rome\n", " Rome\n"),
        ("days", "3", 3),
        ("days", "3.0", 3),
        ("days", "three", "three"),
        ("near", "1e20", 1e20),
        ("near", "null", None),
        ("exact", "True", True),
        ("places", '["a", {"b": null}]', ["a", {"b": None}]),
        ("places", "['a', True]", ["a", True]),
        ("places", "[oops", "[oops"),
        ("other", '{"a": 1}', {"a": 1}),
        ("other", "text", "text"),
    ],
)
def test_arguments_of_elements_have_the_types_of_the_schema(
    key: str, text: str, value: object
) -> None:
    call = f"<tool_call>weather<arg_key>{key}</arg_key><arg_value>{text}</arg_value></tool_call>"

    assert arguments_of(reply_of(call, "glm")) == [{key: value}]


def test_a_circular_schema_ends() -> None:
    circular = {"properties": {"a": {"$ref": "#/properties/a"}}}
    tools = [Tool(function=FunctionDefinition(name="f", parameters=circular))]
    call = "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"

    (made,) = parse(call, "glm", job_id=JOB_ID, tools=tools).tool_calls

    assert made.function.arguments == '{"a": 1}'


def test_ids_are_those_of_the_job_and_the_index() -> None:
    first, second = reply_of(CALL * 2).tool_calls
    (other,) = parse(CALL, "hermes", job_id=uuid.UUID(int=1), tools=TOOLS).tool_calls

    assert [call.id for call in reply_of(CALL * 2).tool_calls] == [first.id, second.id]
    assert len({first.id, second.id, other.id}) == 3


def test_an_id_that_the_model_repeats_is_replaced() -> None:
    call = "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{}<|tool_call_end|>"

    first, second = reply_of(call * 2, "kimi").tool_calls

    assert first.id == "functions.weather:0"
    assert second.id != first.id


def test_early_calls_begin_with_the_name_and_come_as_they_are_written() -> None:
    parser = ReplyParser("hermes", job_id=JOB_ID, tools=TOOLS, tells_early=True)
    deltas = [
        parser.push(piece) for piece in ('<tool_call>{"name": "weather"', ', "arguments": {"ci')
    ]

    (begun,) = deltas[0].tool_calls
    (more,) = deltas[1].tool_calls
    assert (begun.name, begun.arguments) == ("weather", "")
    assert (more.index, more.id, more.arguments) == (0, None, '{"ci')
    (cut,) = joined([*deltas, parser.end()]).tool_calls
    assert cut.function.arguments == '{"ci'


def test_content_does_not_wait_for_the_end() -> None:
    parser = ReplyParser("hermes", job_id=JOB_ID, tools=TOOLS)

    assert parser.push("Hello <tool").content == "Hello"
    assert parser.push("box>").content == " <toolbox>"


@pytest.mark.parametrize(
    ("prompt_end", "is_reasoning"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\nWell, ", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("What is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("", False),
    ],
)
def test_the_prompt_may_begin_the_reasoning(prompt_end: str, is_reasoning: bool) -> None:
    reply = parse("so</think>hi", "hermes", job_id=JOB_ID, prompt_end=prompt_end)

    expected = (
        Reply(content="hi", reasoning="so") if is_reasoning else Reply(content="so</think>hi")
    )
    assert reply == expected


def test_a_call_that_is_thought_of_is_reasoning() -> None:
    reply = reply_of(f"<think>I could {CALL}</think>No.")

    assert reply == Reply(content="No.", reasoning=f"I could {CALL}")


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("{{- '<|im_start|>' + message.content }}", "plain"),
        ('<tool_call>\n{"name": <function-name>, ...}\n</tool_call>', "hermes"),
        ("<tool_call>\n<function=example>\n<parameter=a>", "qwen3-xml"),
        ("<tool_call>{name}<arg_key>{k}</arg_key>", "glm"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "deepseek"),
        ("[INST] [AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ('<|start_header_id|>ipython {"name": n, "parameters": d}', "llama"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "gpt-oss"),
        ("<|tool_calls_section_begin|>", "kimi"),
        ("<|start_of_role|>assistant<tool_call>", "granite"),
        ("xml_tools <tool_call> <think>", "smollm"),
        ("<|tool_call>call:{{ name }}", "gemma"),
        ("{% if thinking %}<think>{% else %}</think>{% endif %}", "hermes"),
    ],
)
def test_a_template_shows_the_family(template: str, family: str) -> None:
    assert family_of(template) == family


def test_a_family_that_is_none_is_invalid() -> None:
    with pytest.raises(Invalid, match="hermes"):
        ReplyParser("herme", job_id=JOB_ID)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_text_is_an_empty_reply(name: str) -> None:
    assert parse("", name, job_id=JOB_ID, tools=TOOLS) == Reply(content="")
