"""Copies weights into memory of our own. The loader maps files: a file changed on disk would change
a running model.

Knows no model. Pages of a mapped original are given back as soon as they are copied, so that memory
never holds both.
"""

from __future__ import annotations

import ctypes
import mmap

from torch import Tensor, nn

MADV_PAGEOUT = 21
"""Lets clean pages of a file leave memory; other pages stay. Linux before 5.4 refuses it, without
harm."""

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def own(module: nn.Module) -> None:
    """Copies every parameter and buffer of a module that is on the CPU, one at a time. Tied tensors
    stay tied."""
    copies: dict[int, Tensor] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type == "cpu" and tensor.numel() > 0:
            mapped = tensor.data
            if mapped.data_ptr() not in copies:
                copies[mapped.data_ptr()] = mapped.clone()
            tensor.data = copies[mapped.data_ptr()]
            give_back(mapped)


def give_back(tensor: Tensor) -> None:
    """Lets the pages of a CPU tensor, [...] of any dtype, leave memory. Its values stay
    readable."""
    begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    _libc.madvise(begin, tensor.data_ptr() + tensor.nbytes - begin, MADV_PAGEOUT)
