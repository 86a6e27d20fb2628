"""Outputs of models as canitoolcall has recorded them, and our replies as its checks take them."""

from __future__ import annotations

import random
import uuid
from functools import cache

import msgspec
from canitoolcall.fixtures import Fixture, load_fixtures
from canitoolcall.pytest_plugin import family_for
from canitoolcall.results import Observation, ParsedToolCall, ParseResult

from shardline.contract.chat import Reply, Tool
from shardline_server.replies import ReplyParser, joined, parse

JOB_ID = uuid.UUID(int=4711)

FAMILY_BY_SLUG = {"qwen3-hermes": "hermes", "gemma4": "gemma"}
"""Our family's name where canitoolcall calls it otherwise."""


def family_name(recorded: Fixture) -> str:
    """Returns the name of our family that its model belongs to."""
    if recorded.models[0].endswith("Kimi-K3"):
        return "kimi-k3"
    return FAMILY_BY_SLUG.get(recorded.family, recorded.family)


@cache
def recorded_outputs() -> tuple[Fixture, ...]:
    """Returns all outputs."""
    return tuple(load_fixtures())


def tools_of(recorded: Fixture) -> list[Tool]:
    """Returns the offered tools, without fields that our contract does not have."""
    fields = ("name", "description", "parameters")
    functions = [tool["function"] for tool in recorded.tools]
    return [
        msgspec.convert({"function": {key: one[key] for key in fields if key in one}}, Tool)
        for one in functions
    ]


def prompt_end(recorded: Fixture) -> str:
    """Returns how the prompt ended: as recorded, or as the model's template ends it."""
    if recorded.generation_prompt is not None:
        return recorded.generation_prompt
    family = family_for(recorded)
    assert family is not None
    models = {model.repo: model for model in family.reference_models}
    return models[recorded.models[0]].default_generation_prompt or ""


def whole_reply(recorded: Fixture, *, tells_early: bool = False) -> Reply:
    """Returns the reply of the output at once."""
    return parse(
        recorded.raw_output,
        family_name(recorded),
        job_id=JOB_ID,
        tools=tools_of(recorded),
        prompt_end=prompt_end(recorded),
        tells_early=tells_early,
    )


def streamed_reply(recorded: Fixture, pieces: list[str], *, tells_early: bool = False) -> Reply:
    """Returns the reply of the output that comes in pieces."""
    parser = ReplyParser(
        family_name(recorded),
        job_id=JOB_ID,
        tools=tools_of(recorded),
        prompt_end=prompt_end(recorded),
        tells_early=tells_early,
    )
    return joined([*map(parser.push, pieces), parser.end()])


def pieces_of(text: str, *, seed: int) -> list[str]:
    """Cuts the text at random; into single characters with seed 0."""
    cuts = random.Random(seed)
    pieces = []
    at = 0
    while at < len(text):
        size = cuts.randint(1, 9) if seed else 1
        pieces.append(text[at : at + size])
        at += size
    return pieces


def as_result(reply: Reply) -> ParseResult:
    """Returns the reply as canitoolcall's checks take it."""
    return ParseResult(
        content=reply.content or None,
        reasoning_content=reply.reasoning,
        tool_calls=tuple(
            ParsedToolCall(name=call.function.name, arguments_raw=call.function.arguments)
            for call in reply.tool_calls
        ),
    )


def observation(recorded: Fixture) -> Observation:
    """Returns the reply of the whole output, and those of its streams."""
    streams = {
        f"rand:{seed}:9": as_result(
            streamed_reply(recorded, pieces_of(recorded.raw_output, seed=seed))
        )
        for seed in range(3)
    }
    return Observation(nonstream=as_result(whole_reply(recorded)), streams=streams)
