"""Weights in memory of our own. The loader maps files: one that is replaced on disk would change a running model.

Knows no model. Pages of a mapped original are given back as soon as they are copied, so that memory never holds both.
"""

from __future__ import annotations

import ctypes
import mmap

from torch import Tensor, nn

MADV_PAGEOUT = 21
"""Non-destructive: clean pages of a file leave memory, others stay. Kernels before 5.4 refuse it, without harm."""

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def own(module: nn.Module) -> None:
    """Copies every parameter and buffer of a module on the CPU, one at a time. Tied ones stay tied."""
    copies: dict[int, Tensor] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type == "cpu" and tensor.numel() > 0:
            mapped = tensor.data
            if mapped.data_ptr() not in copies:
                copies[mapped.data_ptr()] = mapped.clone()
            tensor.data = copies[mapped.data_ptr()]
            give_back(mapped)


def give_back(tensor: Tensor) -> None:
    """Its pages may leave memory now; its values stay readable."""
    begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    _libc.madvise(begin, tensor.data_ptr() + tensor.nbytes - begin, MADV_PAGEOUT)
