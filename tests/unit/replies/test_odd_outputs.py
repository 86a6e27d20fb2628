"""Outputs that no model should write: damaged, cut, mixed. None is an error, none depends on where
it is cut, and every call that comes whole has valid arguments."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from shardline_server.replies import FAMILIES, ReplyParser, joined, parse
from tests.unit.replies.recorded_outputs import (
    JOB_ID,
    family_name,
    pieces_of,
    prompt_end,
    recorded_outputs,
    tools_of,
)

OUTPUTS = [found for found in recorded_outputs() if len(found.raw_output) < 1500]


@st.composite
def damaged(draw: st.DrawFn, text: str) -> str:
    """Removes, repeats and inserts parts, and cuts the end."""
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(0, len(text)))
        end = draw(st.integers(begin, min(len(text), begin + 12)))
        other = draw(st.sampled_from(OUTPUTS)).raw_output
        at = draw(st.integers(0, len(other)))
        piece = draw(st.sampled_from(["", text[begin:end] * 2, other[at : at + 30]]))
        text = text[:begin] + piece + text[end:]
    return text[: draw(st.integers(0, len(text)))] if draw(st.booleans()) else text


@given(data=st.data(), seed=st.integers(0, 9), tells_early=st.booleans())
def test_damage_is_no_error_and_no_cut_changes_the_reply(
    data: st.DataObject, seed: int, tells_early: bool
) -> None:
    recorded = data.draw(st.sampled_from(OUTPUTS))
    text = data.draw(damaged(recorded.raw_output))
    family = data.draw(st.sampled_from([family_name(recorded), *FAMILIES]))
    tools = tools_of(recorded)
    end = prompt_end(recorded)

    whole = parse(text, family, job_id=JOB_ID, tools=tools, prompt_end=end, tells_early=tells_early)
    parser = ReplyParser(
        family, job_id=JOB_ID, tools=tools, prompt_end=end, tells_early=tells_early
    )
    streamed = joined([*map(parser.push, pieces_of(text, seed=seed)), parser.end()])

    assert streamed == whole
    assert {call.function.name for call in whole.tool_calls} <= {one.function.name for one in tools}
    assert len({call.id for call in whole.tool_calls}) == len(whole.tool_calls)
    if not tells_early:
        for call in whole.tool_calls:
            assert isinstance(json.loads(call.function.arguments), dict)


@given(text=st.text(max_size=200), family=st.sampled_from(sorted(FAMILIES)))
def test_text_without_markers_is_content(text: str, family: str) -> None:
    reply = parse(text, family, job_id=JOB_ID)

    assert reply.content == text
    assert reply.reasoning is None
    assert reply.tool_calls == ()
