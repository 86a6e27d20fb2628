"""What the control groups of this process allow it: cores, CPU time, memory. Knows no device.

A container sees its own group as the root; a service of systemd is some levels below it, and every
level limits it. Both versions of cgroups are read.
"""

from __future__ import annotations

import math
import socket
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from shardline.base.errors import Invalid
from shardline_server.host.cores import PREFIX, parse_cores

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
CORES_FILES = ("cpuset.cpus.effective", "cpuset.effective_cpus")
"""Of version 2, and of version 1, which hosts with older systems have."""
MEMORY_FILES = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"),
)
UNLIMITED = 2**63 - 1


def cpuset() -> tuple[int, ...]:
    """Returns the cores that the innermost group may use; none if no group says it."""
    for folder in _folders("cpuset"):
        for name in CORES_FILES:
            with suppress(OSError, Invalid):
                return parse_cores(PREFIX + (folder / name).read_text(encoding="ascii").strip())
    return ()


def cpu_quota() -> float:
    """Returns the seconds of CPU time that this process and its neighbors in the group may take in
    a second, as `docker run --cpus` and limits of pods set it; infinity without a limit."""
    return min(map(_quota, _folders("cpu")), default=math.inf)


def within_quota(cores: Sequence[int]) -> tuple[int, ...]:
    """Returns as many of these cores as the quota pays for, at least one: threads on more would
    all be stopped for most of each period.

    They are neighbors. Containers of a host cannot see each other, so that the host's name says
    which ones.
    """
    num = max(1, math.floor(min(cpu_quota(), len(cores))))
    num_places = max(1, len(cores) // num)
    first = zlib.crc32(socket.gethostname().encode()) % num_places * num
    return tuple(cores[first : first + num])


def memory_limit() -> int:
    """Returns the least limit in bytes; UNLIMITED without one."""
    return min((limit for _, limit, _ in _memory()), default=UNLIMITED)


def memory_left() -> int:
    """Returns the bytes that all limits leave. Page cache that can be dropped counts as free."""
    return max(0, min((limit - used for _, limit, used in _memory()), default=UNLIMITED))


def memory_group() -> int:
    """Returns a number of this host for the innermost group with a limit of memory, for which
    processes share what it leaves; 0 if there is none."""
    return next((folder.stat().st_ino for folder, _, _ in _memory()), 0)


def _folders(controller: str) -> Iterator[Path]:
    """The folders of this process's group and of those around it. A path that is not here is the
    host's: older engines show a container its own group as the root, but not in MEMBERSHIP."""
    try:
        memberships = MEMBERSHIP.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for membership in memberships:
        _, controllers, path = membership.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = ROOT / controller if controllers else ROOT
        own = base / path.lstrip("/")
        yield from (
            folder
            for folder in (own, *own.parents)
            if folder.is_relative_to(base) and folder.is_dir()
        )


def _quota(folder: Path) -> float:
    with suppress(OSError, ValueError):  # `max 100000`: no limit
        quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        return int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota_us = int((folder / "cpu.cfs_quota_us").read_text(encoding="ascii"))
        if quota_us > 0:
            return quota_us / int((folder / "cpu.cfs_period_us").read_text(encoding="ascii"))
    return math.inf


def _memory() -> Iterator[tuple[Path, int, int]]:
    """Each group that has a limit, own first, with limit and use in bytes."""
    for folder in _folders("memory"):
        for names in MEMORY_FILES:
            with suppress(OSError, ValueError):
                limit, used, stat = (
                    (folder / name).read_text(encoding="ascii").strip() for name in names
                )
                lines = map(str.split, stat.splitlines())
                droppable = int(dict(lines).get("inactive_file", 0))
                yield folder, int(limit), int(used) - droppable
