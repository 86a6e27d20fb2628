"""Control messages between a head and the stages of its pipeline, and their bytes. Knows no socket
and no state.

    head → stage    HELLO, START, PING, EXIT, BYE
    stage → head    WELCOME or REFUSE, READY, PONG

An envelope (magic, protocol version) stands before the msgpack, so that peers of two versions can
still refuse each other by name. `docs/wire-format.md` tells the story of a binding.
"""

from __future__ import annotations

import struct
from enum import StrEnum
from typing import Annotated, TypeAlias, TypeVar
from uuid import UUID

import msgspec
from msgspec import Meta

from services.stage.pipeline.status import StageStatus, Text
from shardline.base.errors import ProtocolError
from shardline.contract.wire import (
    PROTOCOL_VERSION,
    Count,
    Name,
    StageCard,
    decode_or_protocol_error,
)

MAX_CONTROL_BYTES = 64 << 10

Decoded = TypeVar("Decoded")

_ENVELOPE = struct.Struct("<2sH")
_MAGIC = b"SC"

Epoch: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Small: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 16)]
Address: TypeAlias = Annotated[str, Meta(max_length=256, pattern=r"^(tcp|ipc)://.")]


class RefusalCode(StrEnum):
    """Why a stage does not join."""

    PROTOCOL = "protocol"
    """Another protocol version."""
    MODEL = "model"
    WEIGHTS = "weights"
    """Another weights fingerprint under the same name."""
    DTYPE = "dtype"
    LAYERS = "layers"
    BUSY = "busy"
    """Bound to another pipeline with a head that is alive."""
    STALE = "stale"
    """An epoch that is not above the one it knows."""
    FAILED = "failed"
    """It cannot open its hop."""


class ControlMessage(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Base of all control messages. Answers repeat pipeline and epoch: a receiver that has gone on
    ignores them."""

    pipeline: UUID
    epoch: Epoch


class Hello(ControlMessage, frozen=True, kw_only=True, array_like=True, tag=1):
    """Join me. The stage gives up lower epochs of this pipeline at once."""

    head: Name
    model: Name
    fingerprint: Name
    dtype: Name
    first_layer: Small
    last_layer: Small
    max_lanes: Small
    """What the stage's queues must hold at least."""


class Welcome(ControlMessage, frozen=True, kw_only=True, array_like=True, tag=2):
    """Bound. `address` receives plans, for this epoch only."""

    address: Address
    card: StageCard
    """The stage's own word: what Redis has proves nothing."""


class Refuse(ControlMessage, frozen=True, kw_only=True, array_like=True, tag=3):
    """Not bound."""

    code: RefusalCode
    reason: Text


class Start(ControlMessage, frozen=True, kw_only=True, array_like=True, tag=4):
    """The whole chain is bound: connect to `next_address` and take your place."""

    place: Small
    num_stages: Small
    num_lanes: Small
    num_blocks: Count
    """Of every stage: the minimum over them."""
    next_address: Address
    sends_int8: bool = False
    """Activations go there as int8."""


class Ready(ControlMessage, frozen=True, kw_only=True, array_like=True, tag=5):
    """Connected; plans may come."""


class Ping(ControlMessage, frozen=True, kw_only=True, array_like=True, tag=6):
    """The head is alive."""

    seq: Count


class Pong(ControlMessage, frozen=True, kw_only=True, array_like=True, tag=7):
    """The stage is alive; unasked for (seq 0) when an error must be reported at once."""

    seq: Count
    status: StageStatus
    """Of the message's epoch."""


class Exit(ControlMessage, frozen=True, kw_only=True, array_like=True, tag=8):
    """You hang: leave with a non-zero status, so that the supervisor starts you again."""

    reason: Text


class Bye(ControlMessage, frozen=True, kw_only=True, array_like=True, tag=9):
    """Released; the stage is free."""


ToStage: TypeAlias = Hello | Start | Ping | Exit | Bye
ToHead: TypeAlias = Welcome | Refuse | Ready | Pong

_encoder = msgspec.msgpack.Encoder()
_to_stage = msgspec.msgpack.Decoder(ToStage)
_to_head = msgspec.msgpack.Decoder(ToHead)


class OtherVersion(ProtocolError):
    """The peer speaks another version of this protocol."""


def encode(message: ToStage | ToHead) -> bytes:
    """Envelope and msgpack."""
    return _ENVELOPE.pack(_MAGIC, PROTOCOL_VERSION) + _encoder.encode(message)


def decode_to_stage(data: bytes) -> ToStage:
    """Raises OtherVersion, or ProtocolError on anything else that no head of this version sends."""
    return _decode(data, _to_stage)


def decode_to_head(data: bytes) -> ToHead:
    """Raises OtherVersion, or ProtocolError on anything else that no stage of this version
    sends."""
    return _decode(data, _to_head)


def refusal_of_version(reason: str) -> Refuse:
    """The answer to a peer of another version; all that it can read of it is the envelope."""
    return Refuse(pipeline=UUID(int=0), epoch=0, code=RefusalCode.PROTOCOL, reason=reason)


def _decode(data: bytes, decoder: msgspec.msgpack.Decoder[Decoded]) -> Decoded:
    if not _ENVELOPE.size <= len(data) <= MAX_CONTROL_BYTES:
        raise ProtocolError(
            f"a control message has {_ENVELOPE.size} to {MAX_CONTROL_BYTES} bytes, not {len(data)}"
        )
    magic, version = _ENVELOPE.unpack_from(data)
    if magic != _MAGIC:
        raise ProtocolError("not a control message of Shardline")
    if version != PROTOCOL_VERSION:
        raise OtherVersion(
            f"the peer speaks protocol version {version}, we speak {PROTOCOL_VERSION}"
        )
    return decode_or_protocol_error(
        memoryview(data)[_ENVELOPE.size :], decoder.decode, "malformed control message"
    )
