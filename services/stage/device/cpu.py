"""Cores of the host as a device: their names, pinning, and the memory that a container may take.
Knows no model."""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import psutil
import torch

from services.stage.device.device import INT4, INT8, Device, Meter
from services.stage.device.machine import machine
from services.stage.device.memory_reservations import MemoryReservations
from services.stage.device.rapl import Rapl
from services.stage.device.watts import Watts
from shardline.base.errors import Invalid
from shardline_server.host import cgroup
from shardline_server.host.cores import FIELD, parse_cores, show_cores


class Cpu(Device):
    """A set of cores."""

    dtypes: ClassVar = {
        "float32": torch.float32,
        **dict.fromkeys(("bfloat16", INT8, INT4), torch.bfloat16),
    }
    dtype_remedies: ClassVar = {
        "float16": "Use float32 or bfloat16, or give this stage an accelerator"
    }

    def __init__(self, name: str, *, worker: str, folder: Path, shared: bool = False) -> None:
        """Locks the cores that a name such as `cpu:0-3` gives.

        Raises Invalid for cores that are not here, and, naming the holder, for those that another
        worker holds.
        """
        self.cores = parse_cores(name)
        _check_usable(self.cores)
        locks = map(lock_name, self.cores)
        super().__init__(
            name, torch.device("cpu"), locks, worker=worker, folder=folder, shared=shared
        )

    def identity(self) -> list[str]:
        """Returns libraries, processor, caches, and the settings that change which kernels run."""
        return machine()

    def available_bytes(self) -> int:
        """Returns the host's."""
        return self.host_bytes()

    def host_bytes(self) -> int:
        """Returns the free memory of the host or of this container, less what other stages have
        promised to take."""
        return free_bytes(self.reservations)

    def total_bytes(self) -> int:
        """Returns the memory of the host, or the container's limit."""
        return memory_bytes()

    def meter(self) -> Meter:
        """Returns RAPL's counters. Raises OSError if they cannot be read."""
        return Meter("rapl", Rapl(self.cores).spent_j)

    def watts(self) -> Watts:
        """Returns the figures of these cores."""
        return Watts.of_cores(len(self.cores))

    def synchronize(self) -> None:
        """Returns at once: operators are done when they return."""


def lock_name(core: int) -> str:
    """Returns the name of a core's lock."""
    return f"core-{core}"


def usable_cores() -> tuple[int, ...]:
    """Returns the cores that this container may use: those of its cgroup, not those that an earlier
    pinning left."""
    return cgroup.cpuset() or tuple(range(os.cpu_count() or 1))


def free_bytes(reservations: MemoryReservations) -> int:
    """Returns the free memory of the host, or of this container, less what other stages have
    promised to take."""
    of_host = psutil.virtual_memory().available - reservations.others()
    of_group = cgroup.memory_left() - reservations.others(same_cgroup=True)
    return max(0, min(of_host, of_group))


def memory_bytes() -> int:
    """Returns the memory of the host, or this container's limit if that is less."""
    return min(psutil.virtual_memory().total, cgroup.memory_limit())


def _check_usable(cores: tuple[int, ...]) -> None:
    usable = usable_cores()
    absent = tuple(core for core in cores if core not in usable)
    if absent:
        raise Invalid(
            FIELD, f"no core {show_cores(absent)} here", f"Use cores among {show_cores(usable)}"
        )


def parts(cores: tuple[int, ...], num: int) -> list[tuple[int, ...]]:
    """Returns `num` parts, of neighbors and as equal as can be."""
    cuts = [len(cores) * part // num for part in range(num + 1)]
    return [cores[begin:end] for begin, end in pairwise(cuts)]


def pin(cores: tuple[int, ...]) -> None:
    """Pins every thread of this process, also those of libraries, and sets one compute thread per
    core."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it ended meanwhile
            os.sched_setaffinity(int(thread.name), cores)
    torch.set_num_threads(len(cores))
