"""Bytes that pass through Redis: a job's deltas and a stage's address card. JSON: any language can read them."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from shardline.errors import ProtocolError
from shardline.job import TokenId, TokenLogprob

PROTOCOL_VERSION = 1
"""Of hops and control links between stages; peers with another one are refused by name."""

DELTA_FIELD = "d"
MAX_DELTA_BYTES = 4 << 20

Decoded = TypeVar("Decoded")


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of one job. A reader accepts one only if `start` equals the number of tokens it already has.

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


class StageCard(msgspec.Struct, frozen=True, kw_only=True):
    """How a live stage is found: the registry's entry. It helps to find addresses and proves nothing."""

    incarnation: Annotated[str, Meta(max_length=64)]
    worker: str
    model: str
    fingerprint: str
    dtype: str
    first_layer: int
    last_layer: int
    """One past the last layer: the shard holds [first_layer, last_layer)."""
    num_layers: int
    control: str
    device: str
    bound_to: str | None = None
    pid: int = 0


def encode_delta(delta: Delta) -> bytes:
    """The delta as JSON."""
    return msgspec.json.encode(delta)


def decode_delta(data: bytes) -> Delta:
    """Raises ProtocolError on anything that is no delta."""
    return _decode(data, Delta, MAX_DELTA_BYTES)


def encode_card(card: StageCard) -> bytes:
    """The card as JSON."""
    return msgspec.json.encode(card)


def decode_card(data: bytes) -> StageCard:
    """Raises ProtocolError on anything that is no card."""
    return _decode(data, StageCard, 64 << 10)


def _decode(data: bytes, kind: type[Decoded], limit_bytes: int) -> Decoded:
    if len(data) > limit_bytes:
        raise ProtocolError(f"{kind.__name__} of {len(data)} bytes is over the limit of {limit_bytes}")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a {kind.__name__}: {error}") from error
