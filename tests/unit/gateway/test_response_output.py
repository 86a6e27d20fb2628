"""Events of a response: the same, with the same numbers, however its tokens arrive."""

from __future__ import annotations

import random
from collections.abc import Sequence
from uuid import UUID

import msgspec
import pytest

from services.gateway.openai.responses import LogprobTexts
from services.gateway.responses.events import ArgumentsDone, ResponseEvent
from services.gateway.responses.output import NO_NAMES, ResponseOutput, ToolNames
from services.gateway.responses.output_items import CallItem, MessageItem, ReasoningItem
from shardline.contract.chat import FunctionDefinition, Tool
from shardline.contract.job import MAX_TOKENS, SamplingParams, TokenLogprob
from shardline_server.replies import ReplyParser
from shardline_server.tokenize import Tokens
from tests.tiny_head import clerk_row

JOB = UUID(int=17)
PARAMS = SamplingParams(stop=("stop",), logprobs=1)
WEATHER = Tool(function=FunctionDefinition(name="f", parameters={"type": "object"}))
CALLS = (
    "<think>hm</think>Yes. "
    '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    return Tokens.from_row(clerk_row())


def output(tokens: Tokens, replies: ReplyParser, tools: ToolNames = NO_NAMES) -> ResponseOutput:
    return ResponseOutput(
        JOB,
        completion=tokens.completion(PARAMS, MAX_TOKENS, (1,)),
        replies=replies,
        logprob_texts=LogprobTexts(tokens.token_texts(PARAMS, (1,))),
        tools=tools,
        first_number=2,
    )


def events(made: ResponseOutput, ids: Sequence[int], cuts: Sequence[int]) -> list[ResponseEvent]:
    """All events of tokens that arrive in pieces."""
    found: list[ResponseEvent] = []
    for start, stop in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        piece = ids[start:stop]
        logprobs = [TokenLogprob(token_id, -1.0, ((token_id, -1.0),)) for token_id in piece]
        found += made.push(piece, logprobs)
    return [*found, *made.end("completed")]


def random_cuts(generator: random.Random, length: int) -> list[int]:
    return sorted(generator.choices(range(length + 1), k=generator.randrange(8)))


@pytest.mark.parametrize("text", ["sum: é 1 😀 2 = 3", "a stop string", "a sto", ""])
def test_events_do_not_depend_on_how_tokens_arrive(tokens: Tokens, text: str) -> None:
    ids = tokens.tokenizer.encode(text).ids
    generator = random.Random(text)
    once = events(output(tokens, ReplyParser("plain", job_id=JOB)), ids, [])
    for _ in range(50):
        cuts = random_cuts(generator, len(ids))
        assert events(output(tokens, ReplyParser("plain", job_id=JOB)), ids, cuts) == once
    assert [one.sequence_number for one in once] == list(range(2, 2 + len(once)))


def test_calls_and_reasoning_are_items_of_their_own(tokens: Tokens) -> None:
    ids = tokens.tokenizer.encode(CALLS).ids
    generator = random.Random(1)

    def reader() -> ReplyParser:
        return ReplyParser("hermes", job_id=JOB, tools=[WEATHER])

    made = output(tokens, reader())
    once = events(made, ids, [])
    for _ in range(20):
        assert events(output(tokens, reader()), ids, random_cuts(generator, len(ids))) == once
    thought, said, first, second = made.items
    assert isinstance(thought, ReasoningItem)
    assert isinstance(said, MessageItem)
    assert isinstance(first, CallItem)
    assert isinstance(second, CallItem)
    assert thought.content[0].text == "hm"
    assert said.content[0].text.strip() == "Yes."
    assert [msgspec.json.decode(one.arguments) for one in (first, second)] == [{"a": 1}, {}]
    assert first.call_id != second.call_id
    assert [one.id for one in made.items] == [
        f"{prefix}_{JOB}_{place}" for place, prefix in enumerate(["rs", "msg", "fc", "fc"])
    ]


def test_a_call_of_a_namespaces_function_has_both_names(tokens: Tokens) -> None:
    tool = Tool(function=FunctionDefinition(name="crm__f", parameters={"type": "object"}))
    reader = ReplyParser("hermes", job_id=JOB, tools=[tool])
    made = output(tokens, reader, ToolNames(namespaces={"crm__f": "crm"}))
    found = events(made, tokens.tokenizer.encode(CALLS.replace('"f"', '"crm__f"')).ids, [])
    calls = [item for item in made.items if isinstance(item, CallItem)]
    assert [(call.namespace, call.name) for call in calls] == [("crm", "f")] * 2
    done = [event.name for event in found if isinstance(event, ArgumentsDone)]
    assert done == ["f", "f"]
