"""Bytes that pass through Redis: a job's deltas and a stage's address card. JSON: any language can
read them.

Owns what holds for all bytes of another process: the version of the protocol, and how those that
are wrong are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from shardline.base.errors import ProtocolError
from shardline.contract.job import TokenId, TokenLogprob

PROTOCOL_VERSION = 8
"""Of hops and control links between stages; peers with another one are refused by name."""

DELTA_FIELD = "d"
MAX_DELTA_BYTES = 4 << 20
MAX_CARD_BYTES = 64 << 10

Count: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Name: TypeAlias = Annotated[str, Meta(max_length=256)]

Data = bytes | bytearray | memoryview
Decoded = TypeVar("Decoded")


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of one job. A reader accepts one only if `start` equals the number of tokens it
    already has.

    `state` is set on the last entry, which is written after the COMMIT that ended the job.
    """

    fence: Annotated[int, Meta(ge=0)]
    start: Annotated[int, Meta(ge=0)]
    ids: tuple[TokenId, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None
    state: str | None = None
    finish_reason: str | None = None

    @property
    def next(self) -> int:
        """The `start` that the following delta must have."""
        return self.start + len(self.ids)


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What a loaded stage can do. The defaults stand for a card of protocol version 6, which does
    not tell it: its stage is still refused by name."""

    num_blocks: Count = 0
    """KV blocks that its memory holds."""
    exactness: Name = ""
    exact: bool = False
    num_slots: Count = 0
    """KV blocks that its offload area holds."""
    num_states: Count = 0
    """Recurrent states that its memory holds; 0: it has no recurrent layer."""
    move_us: Count = 0
    """That a block takes there and back."""
    power: Name = ""
    """The source of its device's power, such as `rapl`; empty: not known."""


class StageCard(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage is, and how it is reached: the registry's entry, and what the stage itself tells
    a head. The entry helps to find addresses and proves nothing."""

    incarnation: Annotated[str, Meta(max_length=64)]
    worker: str
    model: str
    fingerprint: str
    dtype: str
    """Of activations and KV."""
    first_layer: int
    last_layer: int
    """One past the last layer: the shard holds [first_layer, last_layer)."""
    num_layers: int
    control: str
    device: str
    bound_to: str | None = None
    pid: int = 0
    weights_dtype: str
    """As the stage holds them: `int8` next to activations in bfloat16."""
    machine: str
    """Stages with the same value reach each other without a network."""
    capacity: Capacity = Capacity()


class StepSpan(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One step in one stage. Moments are microseconds of the wall clock of that stage's host."""

    epoch: int
    step: int
    began_us: int
    """Its frame had come; on a head: scheduling began."""
    compute_began_us: int
    compute_us: int
    ended_us: int
    """Its frame had left."""
    wait_us: int
    """Before it: no work, while the pipeline had a step in flight."""
    idle_us: int
    """Before it: no step in flight."""
    rows: int
    tokens: int
    context: int
    """Tokens of the KV to which the rows attend, their own included."""
    sampled: int


class StageTrace(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage did in its last steps: its answer to `shardline trace`."""

    worker: str
    pipeline: str
    """The pipeline of the latest steps; empty before the first."""
    layers: tuple[int, int]
    """The shard holds [first, last)."""
    steps: tuple[StepSpan, ...] = ()


_delta_decoder = msgspec.json.Decoder(Delta)
_card_decoder = msgspec.json.Decoder(StageCard)


def encode_delta(delta: Delta) -> bytes:
    """The delta as JSON."""
    return msgspec.json.encode(delta)


def decode_delta(data: bytes) -> Delta:
    """Raises ProtocolError on anything that is no delta."""
    return _decode(data, _delta_decoder.decode, "Delta", MAX_DELTA_BYTES)


def encode_card(card: StageCard) -> bytes:
    """The card as JSON."""
    return msgspec.json.encode(card)


def decode_card(data: bytes) -> StageCard:
    """Raises ProtocolError on anything that is no card."""
    return _decode(data, _card_decoder.decode, "StageCard", MAX_CARD_BYTES)


def decode_or_protocol_error(
    data: Data, decode: Callable[[Data], Decoded], problem: str
) -> Decoded:
    """What another process sent, by the method of a msgspec decoder. Raises ProtocolError, which
    begins so."""
    try:
        return decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{problem}: {error}") from error


def _decode(data: bytes, decode: Callable[[Data], Decoded], name: str, limit_bytes: int) -> Decoded:
    if len(data) > limit_bytes:
        raise ProtocolError(f"{name} of {len(data)} bytes is over the limit of {limit_bytes}")
    return decode_or_protocol_error(data, decode, f"not a {name}")
