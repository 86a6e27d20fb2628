"""Every output that canitoolcall has recorded gives the reply that its authors call right, whole
and streamed, white space included."""

from __future__ import annotations

import pytest
from canitoolcall import checks
from canitoolcall.fixtures import Fixture
from canitoolcall.pytest_plugin import family_for
from canitoolcall.results import Status
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.replies.recorded_outputs import (
    observation,
    recorded_outputs,
    streamed_reply,
    whole_reply,
)

CONTRADICTORY = {
    "gemma4/vllm-text-before-call": "a space before a call is no content here; "
    "gemma4/sglang-text-before-call and -text-around-call say that it is",
}
"""Outputs that differ in white space, since another one of the family asks for it."""

each_output = pytest.mark.parametrize(
    "recorded", recorded_outputs(), ids=[found.id for found in recorded_outputs()]
)


@each_output
def test_the_reply_is_right(recorded: Fixture) -> None:
    may_differ = {Status.SOFT_PASS} if recorded.id in CONTRADICTORY else set()
    rows = checks.run_checks(recorded, family_for(recorded), observation(recorded))

    assert {
        f"{row.check}: {row.detail}" for row in rows if row.status not in {Status.PASS, *may_differ}
    } == set()


def test_all_outputs_are_judged() -> None:
    assert len(recorded_outputs()) == 469


@each_output
@given(data=st.data(), tells_early=st.booleans())
@settings(max_examples=4)
def test_no_cut_changes_the_reply(
    recorded: Fixture, tells_early: bool, data: st.DataObject
) -> None:
    text = recorded.raw_output
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12).map(sorted))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    assert streamed_reply(recorded, pieces, tells_early=tells_early) == whole_reply(
        recorded, tells_early=tells_early
    )
