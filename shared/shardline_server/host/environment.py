"""The environment of a process that has not begun with it, as that of a fork."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path

FIRST_OF_AREA = 47
LAST_OF_AREA = 48
"""Fields of /proc/self/stat, behind the name: where the environment that /proc shows begins and
ends in memory."""


def take_environment(environment: Mapping[str, str]) -> None:
    """Replaces this process's environment, also the one that /proc shows, by which a stack's
    processes are found.

    /proc shows the memory in which the environment stood at the start; what does not fit in there
    is not shown.
    """
    os.environ.clear()
    os.environ.update(environment)
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    begin = int(fields[FIRST_OF_AREA])
    end = int(fields[LAST_OF_AREA])
    shown = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    if len(shown) <= end - begin:
        ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)
