"""Cores of the host as a device: their names, pinning, and the memory that a container may take. Knows no model."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import psutil
import torch

from services.stage.device.device import FIELD, INT8, Device
from services.stage.device.machine import machine
from shardline.errors import Invalid

FORMS = "Write cpu:0, cpu:0-3, cpu:0,2, cuda:0, xpu:0, mps, a GPU's UUID, a kind alone such as cpu or cuda, or auto"
MAX_CORES = 4096
CGROUP = Path("/sys/fs/cgroup")


class Cpu(Device):
    """A set of cores, to which this process is pinned."""

    dtypes: ClassVar = {"float32": torch.float32, "bfloat16": torch.bfloat16, INT8: torch.bfloat16}
    dtype_remedies: ClassVar = {"float16": "Use float32 or bfloat16, or give this stage an accelerator"}

    def __init__(self, name: str, *, worker: str, folder: Path, shared: bool = False) -> None:
        """Takes the cores that a name such as `cpu:0-3` gives.

        Raises Invalid for cores that are not here, and, naming the holder, for those that another worker holds.
        """
        self.cores = parse_cores(name)
        _check_usable(self.cores)
        locks = map(lock_name, self.cores)
        super().__init__(name, torch.device("cpu"), locks, worker=worker, folder=folder, shared=shared)
        _pin(self.cores)

    def identity(self) -> list[str]:
        """Returns libraries, processor, caches, and the settings that change which kernels run."""
        return machine()

    def available_bytes(self) -> int:
        """Returns the free memory of the host or of this container, less what other stages have promised to take."""
        of_host = psutil.virtual_memory().available - self.promises.others()
        return max(0, min(of_host, _cgroup_available_bytes() - self.promises.others(same_cgroup=True)))

    def total_bytes(self) -> int:
        """Returns the memory of the host, or the container's limit."""
        return memory_bytes()

    def synchronize(self) -> None:
        """Returns at once: operators are done when they return."""


def parse_cores(name: str) -> tuple[int, ...]:
    """Returns the cores in a device's name: `cpu:0-3` → (0, 1, 2, 3). Raises Invalid if it is not such a name."""
    cores: set[int] = set()
    for part in name.removeprefix("cpu:").split(","):
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part)
        if match is None or not name.startswith("cpu:"):
            raise Invalid(FIELD, f"{name!r} is not a device", FORMS)
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < MAX_CORES:
            raise Invalid(FIELD, f"{part!r} is not a range of cores (0-{MAX_CORES - 1}, first ≤ last)", FORMS)
        cores |= set(range(first, last + 1))
    return tuple(sorted(cores))


def show_cores(cores: tuple[int, ...]) -> str:
    """Formats cores as ranges: (0, 1, 2, 5) → `0-2,5`."""
    parts: list[list[int]] = []
    for core in cores:
        if parts and core == parts[-1][-1] + 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def lock_name(core: int) -> str:
    """Returns the name of a core's lock."""
    return f"core-{core}"


def usable_cores() -> tuple[int, ...]:
    """Returns the cores that this container may use: those of its cgroup, not those that an earlier pinning left."""
    try:
        text = (CGROUP / "cpuset.cpus.effective").read_text(encoding="ascii").strip()
        return parse_cores(f"cpu:{text}")
    except (OSError, Invalid):
        return tuple(range(os.cpu_count() or 1))


def memory_bytes() -> int:
    """Returns the memory of the host, or this container's limit if that is less."""
    with suppress(OSError, ValueError):
        return min(psutil.virtual_memory().total, int((CGROUP / "memory.max").read_text(encoding="ascii")))
    return psutil.virtual_memory().total


def _check_usable(cores: tuple[int, ...]) -> None:
    usable = usable_cores()
    absent = tuple(core for core in cores if core not in usable)
    if absent:
        raise Invalid(FIELD, f"no core {show_cores(absent)} here", f"Use cores among {show_cores(usable)}")


def _pin(cores: tuple[int, ...]) -> None:
    """Pins every thread of this process, also those of libraries, and sets as many compute threads as cores."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it ended meanwhile
            os.sched_setaffinity(int(thread.name), cores)
    torch.set_num_threads(len(cores))


def _cgroup_available_bytes() -> int:
    """What the container's memory limit leaves. Page cache that can be dropped counts as free."""
    try:
        limit = int((CGROUP / "memory.max").read_text(encoding="ascii"))
        used = int((CGROUP / "memory.current").read_text(encoding="ascii"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text(encoding="ascii").splitlines())
        return max(0, limit - used + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return 2**63 - 1
