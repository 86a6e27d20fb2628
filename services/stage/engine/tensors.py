"""Turns tensors into bytes and back for hops, which know no torch. Knows no plan and no link."""

from __future__ import annotations

import torch
from torch import Tensor

from services.stage.hop import Frame
from shardline.errors import ProtocolError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def name_of(dtype: torch.dtype) -> str:
    """Returns the name that a frame carries for a dtype: `torch.bfloat16` → `bfloat16`."""
    return _NAMES[dtype]


def view_of(tensor: Tensor) -> memoryview:
    """Returns the bytes of a tensor [...] of any dtype. They are copied only from a GPU or if it is not contiguous."""
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data.cast("B")


def tensor_of(frame: Frame, dtype: torch.dtype, buffer: Tensor | None = None) -> Tensor:
    """Returns a copy of the frame's activations, [T, H] of `dtype`: T packed rows of H values each.

    They are copied because received bytes start at any address, and kernels need aligned rows: into `buffer`, uint8
    [bytes], if there is one. Raises ProtocolError if they are missing, of another dtype, or do not fit there.
    """
    if frame.tensor is None or frame.dtype != name_of(dtype):
        raise ProtocolError(f"activations of {name_of(dtype)} are needed, the frame has {frame.dtype or 'none'}")
    received = torch.frombuffer(frame.tensor, dtype=torch.uint8)
    if buffer is None:
        copied = received.clone()
    elif len(received) > len(buffer):
        raise ProtocolError(f"activations of {len(received)} bytes, a step of this stage has {len(buffer)} at most")
    else:
        copied = buffer[: len(received)].copy_(received)
    return copied.view(dtype).reshape(frame.shape)
