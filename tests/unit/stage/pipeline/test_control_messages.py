"""Control messages survive the trip; anything else is refused, never a crash."""

from __future__ import annotations

import struct
from uuid import UUID

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.stage.pipeline import messages
from services.stage.pipeline.status import StageStatus
from shardline.base.errors import ProtocolError
from shardline.contract.wire import PROTOCOL_VERSION
from tests.links import make_card

PIPELINE = UUID(int=9)
HELLO = messages.Hello(
    pipeline=PIPELINE,
    epoch=4,
    head="head@here",
    model="tiny",
    fingerprint="f" * 64,
    dtype="float32",
    first_layer=4,
    last_layer=8,
    max_lanes=3,
)
START = messages.Start(
    pipeline=PIPELINE,
    epoch=4,
    place=1,
    num_stages=2,
    num_lanes=2,
    num_blocks=10,
    next_address="tcp://there:1",
)
WELCOME = messages.Welcome(
    pipeline=PIPELINE,
    epoch=4,
    address="ipc:///run/x",
    card=make_card(4, 8),
)
PONG = messages.Pong(
    pipeline=PIPELINE,
    epoch=4,
    seq=1,
    status=StageStatus(
        epoch=4,
        num_steps=2,
        num_sequences=3,
        num_blocks_used=4,
        compute_us=5,
        hop_us=6,
        wait_us=7,
    ),
)
TO_STAGE: list[messages.ToStage] = [
    HELLO,
    START,
    messages.Ping(pipeline=PIPELINE, epoch=4, seq=1),
    messages.Exit(pipeline=PIPELINE, epoch=4, reason="you hang"),
    messages.Bye(pipeline=PIPELINE, epoch=4),
]
TO_HEAD: list[messages.ToHead] = [
    WELCOME,
    PONG,
    messages.Ready(pipeline=PIPELINE, epoch=4),
    messages.Refuse(pipeline=PIPELINE, epoch=4, code=messages.RefusalCode.BUSY, reason="bound"),
]


def enveloped(payload: bytes, version: int = PROTOCOL_VERSION) -> bytes:
    return struct.pack("<2sH", b"SC", version) + payload


@pytest.mark.parametrize("message", TO_STAGE, ids=lambda message: type(message).__name__)
def test_messages_to_a_stage_survive_the_trip(message: messages.ToStage) -> None:
    assert messages.decode_to_stage(messages.encode(message)) == message


@pytest.mark.parametrize("message", TO_HEAD, ids=lambda message: type(message).__name__)
def test_messages_to_a_head_survive_the_trip(message: messages.ToHead) -> None:
    assert messages.decode_to_head(messages.encode(message)) == message


def test_a_message_in_the_wrong_direction_is_refused() -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        messages.decode_to_stage(messages.encode(WELCOME))


def test_another_version_is_told_apart_whatever_follows() -> None:
    with pytest.raises(
        messages.OtherVersion, match=f"protocol version 9, we speak {PROTOCOL_VERSION}"
    ):
        messages.decode_to_stage(enveloped(b"\xc1 something new", version=9))


def test_a_message_over_the_limit_is_refused_unread() -> None:
    with pytest.raises(ProtocolError, match="has 4 to 65536 bytes, not 65537"):
        messages.decode_to_stage(enveloped(b"\0" * (messages.MAX_CONTROL_BYTES - 3)))


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": -1},
        {"epoch": 1 << 63},
        {"next_address": "inproc://engine"},
        {"next_address": "tcp://" + "x" * 300},
        {"place": 1 << 17},
        {"num_blocks": -1},
    ],
    ids=str,
)
def test_a_field_out_of_bounds_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        messages.decode_to_stage(messages.encode(msgspec.structs.replace(START, **change)))


def test_a_capacity_out_of_bounds_is_refused() -> None:
    card = make_card(4, 8, num_blocks=-1)

    with pytest.raises(ProtocolError, match="malformed"):
        messages.decode_to_head(messages.encode(msgspec.structs.replace(WELCOME, card=card)))


@pytest.mark.parametrize("nesting", [b"\x91", b"\x81\x01"], ids=["arrays", "maps"])
def test_a_field_too_many_is_refused_however_deep_it_is(nesting: bytes) -> None:
    whole = messages.encode(messages.Bye(pipeline=PIPELINE, epoch=4))
    header = whole[:4]
    fields = whole[5:]
    assert whole[4] == 0x93

    with pytest.raises(ProtocolError, match="malformed"):
        messages.decode_to_stage(header + b"\x94" + fields + nesting * 30_000)


@settings(max_examples=1000)
@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_never_crash_the_decoder(data: bytes, is_enveloped: bool) -> None:
    for decode in (messages.decode_to_stage, messages.decode_to_head):
        with pytest.raises(ProtocolError):
            decode(enveloped(data) if is_enveloped else data)


@settings(max_examples=1000)
@given(st.sampled_from([*TO_STAGE, *TO_HEAD]), st.data())
def test_mutated_messages_are_refused_or_within_bounds(
    message: messages.ToStage | messages.ToHead, data: st.DataObject
) -> None:
    raw = bytearray(messages.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    for decode in (messages.decode_to_stage, messages.decode_to_head):
        try:
            decoded = decode(bytes(raw))
        except ProtocolError:
            continue
        assert decode(messages.encode(decoded)) == decoded
