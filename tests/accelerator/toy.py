"""What torch and a stage ask the module of a device type: how many there are, which is current,
their memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

NAME = "toy"
Stream = torch.Stream
Event = torch.Event
_loaded: list[ctypes.CDLL] = []


def load(path: Path) -> None:
    """Loads the backend, which registers its operators, allocators and hooks with torch."""
    torch.ops.load_library(path)
    _loaded.append(ctypes.CDLL(str(path)))
    _loaded[0].toy_allocated_bytes.restype = ctypes.c_int64


def is_available() -> bool:
    """Always: it is the host's memory."""
    return True


def is_initialized() -> bool:
    """There is nothing to set up."""
    return True


def device_count() -> int:
    """Two, so that these can be mixed too."""
    return int(_loaded[0].toy_device_count())


def current_device() -> int:
    """The index of this thread's device."""
    return int(_loaded[0].toy_current_device())


def set_device(index: int) -> None:
    """Makes a device this thread's."""
    _loaded[0].toy_exchange_device(torch.device(NAME, index).index)


@contextmanager
def device(index: int) -> Iterator[None]:
    """A context in which a device is this thread's."""
    before = current_device()
    set_device(index)
    try:
        yield
    finally:
        set_device(before)


def synchronize(_device: object = None) -> None:
    """Operators are done when they return; copies from and to pinned memory are waited for."""
    _loaded[0].toy_synchronize()


def current_stream(index: torch.device | int | None = None) -> torch.Stream:
    """This thread's stream on a device."""
    return torch.accelerator.current_stream(index)


def stream(stream: torch.Stream) -> torch.Stream:
    """A context in which a stream is this thread's: it is one itself."""
    return stream


@contextmanager
def copies_to_host_held() -> Iterator[None]:
    """A context in which no copy to pinned memory ends."""
    _loaded[0].toy_hold_copies_to_host(1)
    try:
        yield
    finally:
        _loaded[0].toy_hold_copies_to_host(0)


def get_device_name(index: int = 0) -> str:
    """A name for people."""
    return f"test accelerator {index}"


def mem_get_info(index: int = 0) -> tuple[int, int]:
    """Free and all memory, bytes: the host's."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def memory_allocated(index: int = 0) -> int:
    """Bytes of living tensors on a device."""
    return int(_loaded[0].toy_allocated_bytes(index))


def manual_seed_all(_seed: int) -> None:
    """Random numbers of these devices are the CPU's."""


def _is_in_bad_fork() -> bool:
    return False
