"""A frame: one step's message and activations as bytes. Owns the header; knows no socket and no
torch.

Parts on the wire: header, message, and the tensor if there is one. `docs/wire-format.md` draws the
header.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeAlias
from uuid import UUID

from shardline.base.errors import ProtocolError
from shardline.contract.wire import PROTOCOL_VERSION

Buffer: TypeAlias = bytes | bytearray | memoryview

MAX_MESSAGE_BYTES = 64 << 20
MAX_TENSOR_BYTES = 256 << 20
MAX_DIMS = 4
MAX_PARTS = 3

DTYPES = {"float32": 1, "bfloat16": 2, "float16": 3, "int8": 4}
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}

_MAGIC = b"SHRD"
_HEADER = struct.Struct(f"<4sHBB16sQQIQB3x{MAX_DIMS}I")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
_DTYPE_NAMES = {code: name for name, code in DTYPES.items()}


class Kind(IntEnum):
    """The kind of a frame's message."""

    PLAN = 1
    """A StepPlan on its way down the chain, with activations behind the head."""
    RESULT = 2
    """The tail's StepResult on its way back to the head."""


_KINDS = frozenset(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One step's bytes: an encoded StepPlan or StepResult as `message`, and activations as
    `tensor`.

    `tensor` is C-contiguous and holds `shape` items of `dtype`.
    """

    kind: Kind
    pipeline: UUID
    epoch: int
    step: int
    message: Buffer
    tensor: memoryview | None = None
    dtype: str = ""
    shape: tuple[int, ...] = ()


class _Header(NamedTuple):
    magic: bytes
    version: int
    kind: int
    dtype: int
    pipeline: bytes
    epoch: int
    step: int
    message_bytes: int
    tensor_bytes: int
    num_dims: int
    dim0: int
    dim1: int
    dim2: int
    dim3: int


def encode(frame: Frame) -> list[Buffer]:
    """Returns the parts to send; neither message nor tensor is copied.

    Raises ProtocolError if the tensor's size is not that of the frame's shape and dtype.
    """
    tensor = None if frame.tensor is None else frame.tensor.cast("B")
    num_bytes = 0 if tensor is None else tensor.nbytes
    if tensor is not None and (
        math.prod(frame.shape) * ITEM_BYTES[frame.dtype] != num_bytes or num_bytes == 0
    ):
        raise ProtocolError(f"a tensor of {num_bytes} bytes is not {frame.shape} of {frame.dtype}")
    dims = frame.shape + (0,) * (MAX_DIMS - len(frame.shape))
    header = _HEADER.pack(
        _MAGIC,
        PROTOCOL_VERSION,
        frame.kind,
        DTYPES[frame.dtype] if tensor is not None else 0,
        frame.pipeline.bytes,
        frame.epoch,
        frame.step,
        len(frame.message),
        num_bytes,
        len(frame.shape),
        *dims,
    )
    payload: list[Buffer] = [frame.message] if tensor is None else [frame.message, tensor]
    return [header + _CHECKSUM.pack(_checksum([header, *payload])), *payload]


def decode(parts: Sequence[Buffer]) -> Frame:
    """Returns the frame of received parts; it shares their memory.

    Raises ProtocolError for any parts that `encode` cannot have made.
    """
    if not 2 <= len(parts) <= MAX_PARTS:
        raise ProtocolError(f"a frame has 2 or 3 parts, not {len(parts)}")
    header = _read_header(parts[0])
    shape = _shape(header)
    lengths = [header.message_bytes, header.tensor_bytes][: 1 if header.tensor_bytes == 0 else 2]
    if [len(part) for part in parts[1:]] != lengths:
        raise ProtocolError(
            f"a frame's parts hold {[len(part) for part in parts[1:]]} bytes, "
            f"its header says {lengths}"
        )
    if (
        _checksum([memoryview(parts[0])[: _HEADER.size], *parts[1:]])
        != _CHECKSUM.unpack_from(parts[0], _HEADER.size)[0]
    ):
        raise ProtocolError(f"wrong checksum in the frame of step {header.step}")
    return Frame(
        kind=Kind(header.kind),
        pipeline=UUID(bytes=header.pipeline),
        epoch=header.epoch,
        step=header.step,
        message=parts[1],
        tensor=memoryview(parts[2]) if header.tensor_bytes else None,
        dtype=_DTYPE_NAMES[header.dtype] if header.tensor_bytes else "",
        shape=shape,
    )


def _read_header(part: Buffer) -> _Header:
    if len(part) != HEADER_BYTES:
        raise ProtocolError(f"a frame's header has {HEADER_BYTES} bytes, not {len(part)}")
    header = _Header._make(_HEADER.unpack_from(part))
    if header.magic != _MAGIC:
        raise ProtocolError("not a frame of Shardline")
    if header.version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the peer speaks protocol version {header.version}, this stage {PROTOCOL_VERSION}"
        )
    if header.kind not in _KINDS:
        raise ProtocolError(f"unknown kind of frame {header.kind}")
    if header.message_bytes > MAX_MESSAGE_BYTES or header.tensor_bytes > MAX_TENSOR_BYTES:
        raise ProtocolError(
            f"a frame of {header.message_bytes} + {header.tensor_bytes} bytes is over the limit of "
            f"{MAX_MESSAGE_BYTES} + {MAX_TENSOR_BYTES}"
        )
    return header


def _shape(header: _Header) -> tuple[int, ...]:
    dims = (header.dim0, header.dim1, header.dim2, header.dim3)
    if header.num_dims > MAX_DIMS or any(dims[header.num_dims :]):
        raise ProtocolError(f"a tensor has at most {MAX_DIMS} dimensions, unused ones are 0")
    shape = dims[: header.num_dims]
    if header.tensor_bytes == 0:
        if shape or header.dtype:
            raise ProtocolError("a frame without a tensor has neither shape nor dtype")
        return ()
    name = _DTYPE_NAMES.get(header.dtype)
    if name is None:
        raise ProtocolError(f"unknown dtype {header.dtype} in a frame")
    if math.prod(shape) * ITEM_BYTES[name] != header.tensor_bytes:
        raise ProtocolError(f"a tensor of {header.tensor_bytes} bytes is not {shape} of {name}")
    return shape


def _checksum(parts: Sequence[Buffer]) -> int:
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return value
