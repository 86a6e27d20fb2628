"""Tensors as bytes and back, for hops: they know no torch."""

from __future__ import annotations

import torch
from torch import Tensor

from services.stage.hop import Frame
from shardline.errors import ProtocolError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def name_of(dtype: torch.dtype) -> str:
    """`torch.bfloat16` → `bfloat16`."""
    return _NAMES[dtype]


def view_of(tensor: Tensor) -> memoryview:
    """The tensor's bytes; copied only from a GPU."""
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data.cast("B")


def tensor_of(frame: Frame, dtype: torch.dtype) -> Tensor:
    """The frame's activations, copied: received bytes start at any address, kernels want aligned rows.

    Raises ProtocolError when they are missing or of another dtype.
    """
    if frame.tensor is None or frame.dtype != name_of(dtype):
        raise ProtocolError(f"activations of {name_of(dtype)} are needed, the frame has {frame.dtype or 'none'}")
    return torch.frombuffer(frame.tensor, dtype=torch.uint8).clone().view(dtype).reshape(frame.shape)
