"""Bytes that no head of ours sends, from a seed: frames, plans, control messages, connections.
Knows no socket."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

import msgspec

from services.stage.hop.frame import HEADER_BYTES, MAX_MESSAGE_BYTES, MAX_TENSOR_BYTES, Buffer
from services.stage.pipeline import messages
from shardline.contract.job import SamplingParams
from shardline_scheduler.step_plan import Move, Open, Row, StepPlan, encode

CHECKSUM_BYTES = 4
FIELDS = {
    "magic": (0, 4),
    "version": (4, 2),
    "kind": (6, 1),
    "dtype": (7, 1),
    "pipeline": (8, 16),
    "epoch": (24, 8),
}
FIELDS |= {
    "step": (32, 8),
    "message": (40, 4),
    "tensor": (44, 8),
    "dims": (52, 1),
    "shape": (56, 16),
}
LENGTHS = (0, 1, MAX_MESSAGE_BYTES + 1, MAX_TENSOR_BYTES + 1, (1 << 32) - 1, 1 << 31)
DEEP = 20_000
PROMPT = (5, 6, 7)
GOOD = StepPlan(
    0,
    (Open(1, PROMPT, len(PROMPT), SamplingParams(temperature=1.0), 9, 4),),
    (Row(1, 0, len(PROMPT), (), (0,), True),),
    (),
)
"""A step that every tail can run."""
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32)
"""ZMTP 3.0 without security."""


def broken(rng: random.Random, parts: Sequence[Buffer]) -> list[bytes]:
    """A real frame or message, broken in one of many ways."""
    way = rng.choice((_noise, _cut, _flipped, _shuffled, _misleading, _misleading, _replanned))
    return way(rng, [bytes(part) for part in parts])


def _noise(rng: random.Random, parts: list[bytes]) -> list[bytes]:
    return [
        rng.randbytes(rng.choice((0, 3, HEADER_BYTES, 500))) for _ in range(rng.randrange(1, 6))
    ]


def _cut(rng: random.Random, parts: list[bytes]) -> list[bytes]:
    place = rng.randrange(len(parts))
    parts[place] = parts[place][: rng.randrange(len(parts[place]) or 1)]
    return parts[: rng.randrange(1, len(parts) + 1)]


def _flipped(rng: random.Random, parts: list[bytes]) -> list[bytes]:
    place = rng.randrange(len(parts))
    part = bytearray(parts[place] or b"\0")
    for _ in range(rng.randrange(1, 5)):
        part[rng.randrange(len(part))] ^= 1 << rng.randrange(8)
    parts[place] = bytes(part)
    return parts


def _shuffled(rng: random.Random, parts: list[bytes]) -> list[bytes]:
    return rng.choices(parts, k=rng.randrange(1, 7))


def _misleading(rng: random.Random, parts: list[bytes]) -> list[bytes]:
    """With a right checksum over a header that is not."""
    if len(parts[0]) != HEADER_BYTES:
        return _flipped(rng, parts)
    begin, size = FIELDS[rng.choice(list(FIELDS))]
    value = rng.choice(
        (rng.randbytes(size), rng.choice(LENGTHS).to_bytes(8, "little")[:size].ljust(size, b"\0"))
    )
    return sealed(parts[0][:begin] + value + parts[0][begin + size :], parts[1:])


def _replanned(rng: random.Random, parts: list[bytes]) -> list[bytes]:
    """A whole frame around another plan."""
    if len(parts[0]) != HEADER_BYTES:
        return _flipped(rng, parts)
    (message,) = _flipped(rng, [parts[1]])
    header = parts[0][:40] + struct.pack("<I", len(message)) + parts[0][44:]
    return sealed(header, [message, *parts[2:]])


def sealed(header: bytes, payload: Sequence[bytes]) -> list[bytes]:
    """The frame with its right checksum."""
    value = 0
    for part in (body := header[:-CHECKSUM_BYTES], *payload):
        value = zlib.crc32(part, value)
    return [body + struct.pack("<I", value), *payload]


def _plans() -> dict[str, StepPlan]:
    """Plans of step 0 that a stage must refuse, by what is wrong with them."""
    good = GOOD
    (opened,), (row,) = good.opens, good.rows

    def with_open(**change: Any) -> StepPlan:
        return msgspec.structs.replace(good, opens=(msgspec.structs.replace(opened, **change),))

    def with_row(**change: Any) -> StepPlan:
        return msgspec.structs.replace(good, rows=(msgspec.structs.replace(row, **change),))

    def with_move(**change: Any) -> StepPlan:
        move = msgspec.structs.replace(Move(0, 0, is_out=True), **change)
        return msgspec.structs.replace(good, moves=(Move(0, 0, is_out=True), move))

    return {
        "another step": msgspec.structs.replace(good, step=7),
        "a negative step": msgspec.structs.replace(good, step=-1),
        "an id beyond the vocabulary": with_open(ids=(5, 1 << 30, 7)),
        "a negative id": with_open(ids=(5, -1, 7)),
        "a seed beyond its key": with_open(seed=1 << 63),
        "a negative seed": with_open(seed=-1),
        "no place for KV": with_open(num_blocks=0),
        "more KV than tokens": with_open(num_cached=64),
        "a negative number of tokens with KV": with_open(num_cached=-64),
        "opened twice": msgspec.structs.replace(good, opens=(opened, opened)),
        "too many sequences": msgspec.structs.replace(
            good, opens=tuple(msgspec.structs.replace(opened, seq=seq) for seq in range(20_000))
        ),
        "closed before it was open": msgspec.structs.replace(good, closes=(99,)),
        "a row of nobody": with_row(seq=99),
        "guesses in a prompt": with_row(drafts=(1,)),
        "guesses beyond the vocabulary": with_row(start=0, length=2, ids=(1,), drafts=(1 << 30,)),
        "more guesses than a row may have": with_row(length=65, ids=(1,), drafts=(1,) * 64),
        "a row beyond its ids": with_row(length=4),
        "a row over the budget": with_row(length=1 << 40),
        "a row of no length": with_row(length=0),
        "a row that runs back": with_row(length=-3),
        "a gap before a row": with_row(start=1),
        "a block beyond the pool": with_row(blocks=(1 << 30,)),
        "a negative block": with_row(blocks=(-1,)),
        "more blocks than reserved": with_row(blocks=(0, 1, 2, 3, 4)),
        "no block": with_row(blocks=()),
        "a move of a block beyond the pool": with_move(block=1 << 30),
        "a move to a slot beyond the area": with_move(slot=1 << 30),
        "a move back from a slot beyond the area": with_move(slot=1 << 30, is_out=False),
        "a move of a negative block": with_move(block=-1),
        "a move to a negative slot": with_move(slot=-1),
        "a new id beyond the vocabulary": with_row(ids=(1 << 40,)),
    }


def damaged_messages() -> dict[str, bytes]:
    """Bytes in place of GOOD, by what is wrong with them."""
    whole = encode(GOOD)
    return {
        **{name: encode(plan) for name, plan in _plans().items()},
        "nothing": b"",
        "no msgpack": b"\xc1",
        "a map": b"\x80",
        "deep arrays": b"\x95" + whole[1:] + b"\x91" * DEEP,
        "deep maps": b"\x95" + whole[1:] + b"\x81\x01" * DEEP,
        "an array without end": b"\xdd\xff\xff\xff\xff",
        "a map without end": b"\xdf\xff\xff\xff\xff",
        "a string without end": b"\x94\xdb\xff\xff\xff\xff",
        "ids without end": b"\x94\x00\x91\x96\x01\xdd\xff\xff\xff\xff" + b"\x01" * 100,
        "text that is no UTF-8": encode(
            StepPlan(0, (Open(1, (5,), 1, SamplingParams(stop=("stop",)), 9, 1),), (), ())
        ).replace(b"stop", b"st\xffp"),
    }


def control_messages() -> list[bytes]:
    """Control messages that are right but for their sender, to be broken; and some that are broken
    already."""
    stranger = uuid4()
    hello = messages.Hello(
        pipeline=stranger,
        epoch=1,
        head="stranger",
        model="another",
        fingerprint="0" * 64,
        dtype="float32",
        first_layer=0,
        last_layer=1,
        max_lanes=2,
    )
    start = messages.Start(
        pipeline=stranger,
        epoch=1,
        place=1,
        num_stages=2,
        num_lanes=2,
        num_blocks=1,
        next_address="tcp://127.0.0.1:1",
    )
    exiting = messages.Exit(pipeline=stranger, epoch=1, reason="because")
    whole = messages.encode(messages.Bye(pipeline=stranger, epoch=1))
    return [
        messages.encode(hello),
        messages.encode(start),
        messages.encode(exiting),
        messages.encode(messages.Ping(pipeline=stranger, epoch=1, seq=1)),
        whole,
        whole[:4] + b"\x94" + whole[5:] + b"\x91" * DEEP,
        whole[:4] + b"\x94" + whole[5:] + b"\x81\x01" * DEEP,
        whole[:4] + b"\xdd\xff\xff\xff\xff",
        messages.encode(exiting).replace(b"because", b"bec\xffuse"),
    ]


def calls(rng: random.Random, socket_type: bytes) -> bytes:
    """What a stranger's connection says to a port where ZeroMQ listens."""
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(socket_type)) + socket_type
    met = GREETING + struct.pack("BB", 4, len(ready)) + ready
    ways: Sequence[Callable[[], bytes]] = (
        lambda: rng.randbytes(rng.randrange(200)),
        lambda: b"GET / HTTP/1.1\r\nHost: stage\r\n\r\n",
        lambda: GREETING[: rng.randrange(64)],
        lambda: GREETING + rng.randbytes(rng.randrange(100)),
        lambda: (
            met
            + b"\x02"
            + struct.pack(">Q", rng.choice((1 << 28, 1 << 40, (1 << 63) + 1)))
            + b"x" * 100
        ),
        lambda: met + rng.randbytes(rng.randrange(300)),
    )
    return rng.choice(ways)()
