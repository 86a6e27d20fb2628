"""Turns tensors into bytes and back for hops, which know no torch. Knows no plan and no link.

Letters of shapes: T packed rows of a step, H the hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.stage.hop import Frame
from services.stage.hop.frame import MAX_TENSOR_BYTES
from shardline.base.errors import Invalid, ProtocolError

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

INT8_MAX = 127
SCALE_BYTES = 4
"""Behind the H values of each row of int8: what their units are worth, a float32."""


def name_of(dtype: torch.dtype) -> str:
    """Returns the name that a frame carries for a dtype: `torch.bfloat16` → `bfloat16`."""
    return _NAMES[dtype]


def view_of(tensor: Tensor) -> memoryview:
    """Returns the bytes of a tensor [...] of any dtype. They are copied only from a GPU or if it is
    not contiguous."""
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data.cast("B")


@torch.inference_mode()
def quantized(states: Tensor) -> Tensor:
    """Returns activations [T, H] of any float dtype as int8 [T, H + 4]: each row in units of its
    scale, then that.

    The scale is the row's largest absolute value over 127, so a row's bytes depend on that row
    only. One that holds NaN or infinity becomes NaN.
    """
    rows = states.float()
    scales = rows.abs().amax(dim=1) / INT8_MAX
    units = (
        (rows / torch.where(scales == 0, 1.0, scales)[:, None]).round().clamp(-INT8_MAX, INT8_MAX)
    )
    return torch.cat(
        [units.to(torch.int8), scales.view(torch.int8).view(len(rows), SCALE_BYTES)], dim=1
    )


def tensor_of(frame: Frame, dtype: torch.dtype, buffer: Tensor | None = None) -> Tensor:
    """Returns a copy of the frame's activations, [T, H] of `dtype`: T packed rows of H values each.

    They are copied because received bytes start at any address, and kernels need aligned rows: into
    `buffer`, uint8 [bytes], if there is one. Activations of int8 are multiplied by their scales.
    Raises ProtocolError if they are missing, of another dtype, or do not fit there.
    """
    if frame.tensor is None or frame.dtype not in (name_of(dtype), name_of(torch.int8)):
        raise ProtocolError(
            f"activations of {name_of(dtype)} are needed, the frame has {frame.dtype or 'none'}"
        )
    received = torch.frombuffer(frame.tensor, dtype=torch.uint8)
    shape = frame.shape
    if frame.dtype == name_of(torch.int8):
        states = _floats(received, shape).to(dtype)
        received = states.flatten().view(torch.uint8)
        shape = tuple(states.shape)
    if buffer is None:
        copied = received.clone()
    elif len(received) > len(buffer):
        raise ProtocolError(
            f"activations of {len(received)} bytes, a step of this stage has {len(buffer)} at most"
        )
    else:
        copied = buffer[: len(received)].copy_(received)
    return copied.view(dtype).reshape(shape)


def _floats(received: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The rows of received bytes, float32 [T, H]."""
    if len(shape) != 2 or shape[1] <= SCALE_BYTES:
        raise ProtocolError(
            f"activations of int8 are rows of values and a scale, the frame has {shape}"
        )
    rows = received.view(torch.int8).reshape(shape)
    scales = rows[:, -SCALE_BYTES:].contiguous().view(torch.float32)
    return rows[:, :-SCALE_BYTES].float() * scales


def check_frames(token_budget: int, row_bytes: int) -> None:
    """Raises Invalid if the activations of a full step, of `row_bytes` each, do not fit into a
    frame."""
    if token_budget * row_bytes > MAX_TENSOR_BYTES:
        problem = (
            f"{token_budget:,} rows of {row_bytes:,} bytes are over a frame's limit "
            f"of {MAX_TENSOR_BYTES >> 20} MiB"
        )
        raise Invalid(
            "SHARDLINE_TOKEN_BUDGET",
            problem,
            f"Set it to {MAX_TENSOR_BYTES // row_bytes:,} or less",
        )
