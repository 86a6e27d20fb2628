"""A device of this process for tests: its threads are pinned for a while, and free afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from services.stage.device.acquire import acquire
from services.stage.device.cpu import pin
from services.stage.device.device import Device


@contextmanager
def unpinned_afterwards() -> Iterator[None]:
    """Gives every thread its cores back: stacks that later tests start inherit them."""
    cores = os.sched_getaffinity(0)
    num_threads = torch.get_num_threads()
    try:
        yield
    finally:
        pin(tuple(cores))
        torch.set_num_threads(num_threads)


def cores_of_threads() -> set[tuple[int, ...]]:
    """The cores that each thread of this process may use, also those of libraries."""
    found = set()
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it ended meanwhile
            found.add(tuple(os.sched_getaffinity(int(thread.name))))
    return found


@contextmanager
def first_core(lock_folder: Path) -> Iterator[Device]:
    """Core 0, locked in a folder of the caller's own."""
    with unpinned_afterwards():
        device = acquire("cpu:0", worker="tests", lock_folder=lock_folder)
        try:
            yield device
        finally:
            device.release()
