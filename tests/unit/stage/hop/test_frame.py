"""Bytes that are no frame never get through, whatever they are, and never bring the process
down."""

from __future__ import annotations

import struct
import zlib
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.stage.hop.frame import (
    DTYPES,
    HEADER_BYTES,
    ITEM_BYTES,
    Buffer,
    Frame,
    Kind,
    decode,
    encode,
)
from shardline.base.errors import ProtocolError

U64 = st.integers(0, (1 << 64) - 1)
U32 = st.integers(0, (1 << 32) - 1)


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    has_tensor = draw(st.booleans())
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))) if has_tensor else ()
    dtype = draw(st.sampled_from(sorted(DTYPES))) if has_tensor else ""
    num_items = 1
    for size in shape:
        num_items *= size
    num_bytes = num_items * ITEM_BYTES[dtype] if has_tensor else 0
    return Frame(
        kind=draw(st.sampled_from(Kind)),
        pipeline=draw(st.uuids()),
        epoch=draw(U64),
        step=draw(U64),
        message=draw(st.binary(max_size=64)),
        tensor=memoryview(draw(st.binary(min_size=num_bytes, max_size=num_bytes)))
        if has_tensor
        else None,
        dtype=dtype,
        shape=shape,
    )


def wire(frame: Frame) -> list[bytes]:
    return [bytes(part) for part in encode(frame)]


def resealed(header: bytes, payload: list[bytes]) -> list[bytes]:
    """With a right checksum: what a peer with another idea of the protocol would send."""
    body = header[: HEADER_BYTES - 4]
    value = 0
    for part in [body, *payload]:
        value = zlib.crc32(part, value)
    return [body + struct.pack("<I", value), *payload]


EXAMPLE = Frame(
    kind=Kind.PLAN,
    pipeline=UUID(int=5),
    epoch=3,
    step=9,
    message=b"plan",
    tensor=memoryview(bytes(range(48))),
    dtype="float32",
    shape=(3, 4),
)


@given(frames())
def test_what_was_encoded_decodes_to_itself(frame: Frame) -> None:
    assert decode(wire(frame)) == frame


def test_encoding_copies_neither_message_nor_tensor() -> None:
    message = bytearray(b"plan")
    tensor = bytearray(48)
    parts = encode(
        Frame(
            kind=Kind.PLAN,
            pipeline=UUID(int=5),
            epoch=3,
            step=9,
            message=memoryview(message),
            tensor=memoryview(tensor),
            dtype="float32",
            shape=(12,),
        )
    )

    message[0], tensor[0] = 7, 8

    assert (parts[1][0], parts[2][0]) == (7, 8)


@given(frames(), st.data())
def test_a_changed_bit_anywhere_is_noticed(frame: Frame, data: st.DataObject) -> None:
    parts = wire(frame)
    index = data.draw(st.sampled_from([index for index, part in enumerate(parts) if part]))
    bit = data.draw(st.integers(0, len(parts[index]) * 8 - 1))
    changed = bytearray(parts[index])
    changed[bit // 8] ^= 1 << bit % 8
    parts[index] = bytes(changed)

    with pytest.raises(ProtocolError):
        decode(parts)


@given(frames(), st.data())
def test_cut_lengthened_and_swapped_parts_are_noticed(frame: Frame, data: st.DataObject) -> None:
    parts = wire(frame)
    index = data.draw(st.integers(0, len(parts) - 1))
    change = data.draw(st.sampled_from(["cut", "lengthen", "drop", "double"]))
    if change == "cut" and parts[index]:
        parts[index] = parts[index][:-1]
    elif change == "drop":
        del parts[index]
    elif change == "double":
        parts.insert(index, parts[index])
    else:
        parts[index] += b"\0"

    with pytest.raises(ProtocolError):
        decode(parts)


@given(st.lists(st.binary(max_size=200), max_size=5))
def test_random_bytes_are_refused(parts: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        decode(parts)


@given(
    st.binary(min_size=HEADER_BYTES - 8, max_size=HEADER_BYTES - 8),
    st.binary(max_size=16),
    st.binary(max_size=16),
)
def test_a_well_sealed_header_of_nonsense_is_refused_or_consistent(
    rest: bytes, message: bytes, tensor: bytes
) -> None:
    parts: list[Buffer] = list(resealed(wire(EXAMPLE)[0][:4] + rest, [message, tensor]))
    try:
        frame = decode(parts)
    except ProtocolError:
        return
    assert wire(frame) == parts


@given(
    shape=st.lists(U32, min_size=4, max_size=4),
    num_dims=st.integers(0, 255),
    dtype=st.integers(0, 255),
)
def test_a_shape_that_does_not_fit_the_bytes_is_refused(
    shape: list[int], num_dims: int, dtype: int
) -> None:
    header, *payload = wire(EXAMPLE)
    changed = (
        header[:7]
        + bytes([dtype])
        + header[8:52]
        + struct.pack("<B3x4I", num_dims, *shape)
        + header[72:]
    )
    try:
        frame = decode(resealed(changed, payload))
    except ProtocolError:
        return
    assert frame.tensor is not None
    assert frame.tensor.nbytes == 48


@pytest.mark.parametrize(
    ("offset", "replacement", "problem"),
    [
        (0, b"HTTP", "not a frame"),
        (4, b"\x09\x00", "protocol version 9, this stage"),
        (6, b"\x09", "unknown kind"),
        (40, b"\xff\xff\xff\xff", "over the limit"),
        (44, b"\xff" * 8, "over the limit"),
        (52, b"\x05", "at most 4 dimensions"),
    ],
)
def test_a_refusal_says_what_is_wrong(offset: int, replacement: bytes, problem: str) -> None:
    header, *payload = wire(EXAMPLE)
    changed = header[:offset] + replacement + header[offset + len(replacement) :]

    with pytest.raises(ProtocolError, match=problem):
        decode(resealed(changed, payload))


def test_a_wrong_checksum_is_refused() -> None:
    header, *payload = wire(EXAMPLE)

    with pytest.raises(ProtocolError, match="wrong checksum in the frame of step 9"):
        decode([header[:-1] + bytes([header[-1] ^ 1]), *payload])


def test_a_tensor_that_does_not_match_its_shape_is_not_sent() -> None:
    frame = Frame(
        kind=Kind.PLAN,
        pipeline=UUID(int=5),
        epoch=3,
        step=9,
        message=b"",
        tensor=memoryview(bytes(10)),
        dtype="float16",
        shape=(4,),
    )

    with pytest.raises(ProtocolError, match="10 bytes"):
        encode(frame)
