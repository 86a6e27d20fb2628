"""What the first rank of a stage tells the others, and its bytes. Tensors go through the memory
that they share."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from shardline_scheduler.step_plan import Move


class PassKind(StrEnum):
    """What a pass over the layers gives."""

    HIDDEN = "hidden"
    SAMPLED = "sampled"
    WRITE = "write"


class LoadShard(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Load these layers next to the first rank, under a number."""

    number: int
    model: str
    """A folder."""
    layers: tuple[int, int]
    dtype: str
    token_budget: int
    max_open: int
    offload_bytes: int
    """Of all ranks."""
    offload_folder: str | None
    streams: bool
    streamed_folder: str
    cache_folder: str


class RunPass(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run packed rows through the layers of a number; the input follows through the shared
    memory."""

    number: int
    kind: PassKind
    spans: tuple[tuple[int, int, tuple[int, ...]], ...]
    """Start, length and KV blocks of each."""
    rows: tuple[int, ...]
    """The sampled ones."""
    left_out: tuple[int, ...]
    """Layers that return their input."""
    adapters: tuple[tuple[str, tuple[int, ...]], ...]
    """Fingerprints, and to which packed rows each adds."""
    shape: tuple[int, ...]
    dtype: str
    """Of the input."""


class MoveBlocks(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Copy KV blocks to slots and back, before the next pass."""

    number: int
    moves: tuple[Move, ...]


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Load an adapter that the first rank has just loaded."""

    number: int
    fingerprint: str
    weights: str
    """A file."""
    stamp: tuple[int, int, int]
    """Size and times of the file."""
    layers: dict[str, tuple[int, float]]
    """Ranks of the matrices and scales, by the names of the model's linear layers."""


class DropAdapter(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Forget it: another one needs its place."""

    number: int
    fingerprint: str


class DropShard(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Forget the layers of a number."""

    number: int


Message = LoadShard | RunPass | MoveBlocks | LoadAdapter | DropAdapter | DropShard

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Returns the bytes of a message."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Returns the message of these bytes, which another rank of this stage has sent."""
    return _decoder.decode(data)
