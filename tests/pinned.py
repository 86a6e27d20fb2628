"""A device of this process for tests: its threads are pinned for a while, and free afterwards.
Processes of pytest-xdist begin with different cores, so that they compute side by side."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from services.stage.device.acquire import acquire
from services.stage.device.cpu import pin, usable_cores
from services.stage.device.device import Device


def own_cores(num: int = 1) -> tuple[int, ...]:
    """`num` cores for this process, or all if there are fewer."""
    cores = usable_cores()
    first = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % len(cores)
    return (cores[first:] + cores[:first])[:num]


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
    """The first of this process's own cores, locked in a folder of the caller's."""
    (core,) = own_cores()
    with unpinned_afterwards():
        device = acquire(f"cpu:{core}", worker="tests", lock_folder=lock_folder)
        try:
            yield device
        finally:
            device.release()
