"""Step messages from bytes that no stage of ours has sent: always a ProtocolError, which ends a
link and no thread."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.base.errors import ProtocolError
from shardline.contract.job import SamplingParams
from shardline_scheduler.step_plan import (
    MAX_DRAFTS,
    Move,
    Open,
    Row,
    StepPlan,
    StepResult,
    decode_plan,
    decode_result,
    encode,
)

OPEN = Open(1, (5, 6, 7), 3, SamplingParams(stop=("stop",)), 9, 1)
PLAN = StepPlan(
    4,
    (OPEN,),
    (Row(1, 0, 3, (), (0,), True), Row(3, 9, 3, (4,), (), True, (5, 6))),
    (2,),
    7,
    (Move(3, 0, True),),
)
RESULT = StepResult(4, ((7,),), bad=(1,))
Decoder = Callable[[bytes], StepPlan | StepResult]


@pytest.mark.parametrize(("message", "decode"), [(PLAN, decode_plan), (RESULT, decode_result)])
def test_a_decoded_message_is_itself(message: StepPlan | StepResult, decode: Decoder) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "change",
    [{"num_prompt": -1}, {"seed": -1}, {"seed": 1 << 63}, {"num_blocks": -1}, {"num_cached": -1}],
    ids=str,
)
def test_a_number_that_no_key_holds_is_refused(change: dict[str, int]) -> None:
    plan = msgspec.structs.replace(PLAN, opens=(msgspec.structs.replace(OPEN, **change),))

    with pytest.raises(ProtocolError, match="not a StepPlan: Expected `int`"):
        decode_plan(encode(plan))


@pytest.mark.parametrize("move", [Move(-1, 0, True), Move(0, -1, False)], ids=str)
def test_a_move_of_no_block_or_slot_is_refused(move: Move) -> None:
    with pytest.raises(ProtocolError, match="not a StepPlan: Expected `int`"):
        decode_plan(encode(msgspec.structs.replace(PLAN, moves=(move,))))


def test_more_drafts_than_a_row_may_have_are_refused() -> None:
    row = msgspec.structs.replace(PLAN.rows[1], drafts=(5,) * (MAX_DRAFTS + 1))

    with pytest.raises(ProtocolError, match="not a StepPlan: Expected `array` of length <= 63"):
        decode_plan(encode(msgspec.structs.replace(PLAN, rows=(row,))))


@pytest.mark.parametrize(("message", "decode"), [(PLAN, decode_plan), (RESULT, decode_result)])
@pytest.mark.parametrize("step", [-1, 1 << 63])
def test_a_step_that_no_header_holds_is_refused(
    message: StepPlan | StepResult, decode: Decoder, step: int
) -> None:
    with pytest.raises(ProtocolError, match="Expected `int`"):
        decode(encode(msgspec.structs.replace(message, step=step)))


def test_text_that_is_no_utf_8_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"not a StepPlan: .*(?i:utf-8)"):
        decode_plan(encode(PLAN).replace(b"stop", b"st\xffp"))


def test_a_deep_extra_field_is_refused() -> None:
    whole = encode(PLAN)
    assert whole[0] == 0x98

    with pytest.raises(ProtocolError, match="not a StepPlan: maximum recursion"):
        decode_plan(b"\x99" + whole[1:] + b"\x91" * 100_000)


@settings(max_examples=1000)
@given(st.sampled_from([PLAN, RESULT]), st.data())
def test_a_changed_message_is_refused_or_decoded(
    message: StepPlan | StepResult, data: st.DataObject
) -> None:
    raw = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    for decode in (decode_plan, decode_result):
        try:
            decode(bytes(raw))
        except ProtocolError:
            continue
