"""Which cores of this machine other stacks of this user already work on. Knows no stage.

A stack holds a lock on each core that it uses, and the kernel frees it when the supervisor dies. Within a stack the
stages have their own locks; between stacks sharing is allowed, but it is slower and therefore said.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, Self


def usable_cores() -> list[int]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


class CoreClaims:
    """The locks of one stack, while entered."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(tempfile.gettempdir()) / f"shardline-cores-{os.geteuid()}"
        self._held: dict[int, IO[str]] = {}

    def claim(self, cores: Iterable[int]) -> frozenset[int]:
        """Take every core that is free. Returns those that another stack holds."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        taken = set()
        for core in cores:
            file = (self._folder / f"core-{core}.lock").open("a")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                taken.add(core)
            else:
                self._held[core] = file
        return frozenset(taken)

    def keep(self, cores: Iterable[int]) -> None:
        """Give back every claimed core but these."""
        for core in set(self._held) - set(cores):
            self._held.pop(core).close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.keep(())
