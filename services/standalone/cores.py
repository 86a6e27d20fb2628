"""Claims cores of this machine, so that stacks of one user use different ones. Knows no stage.

Every stack holds a shared lock on each core that it uses, and the kernel frees it when the
supervisor dies: a core is free while no lock prevents an exclusive one. Within a stack the stages
have their own locks; between stacks sharing is allowed, but slower, and therefore reported.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from shardline_server.host.cgroup import within_quota
from shardline_server.host.lock_file import try_lock
from shardline_server.host.private import open_private_file, open_private_folder, user_folder

FIELD = "XDG_RUNTIME_DIR"
"""The variable that names this user's folder; without it the temporary folder is used."""


def usable_cores() -> list[int]:
    """The cores that this process may run on, as many as its CPU quota pays for."""
    if hasattr(os, "sched_getaffinity"):
        return list(within_quota(sorted(os.sched_getaffinity(0))))
    return list(range(os.cpu_count() or 1))


class CoreClaims:
    """The locks of one stack, while entered."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or user_folder() / "cores"
        self._held: dict[int, int] = {}

    def claim(self, cores: Iterable[int]) -> frozenset[int]:
        """Hold every core. Returns those that another stack holds too."""
        folder = open_private_folder(self._folder, FIELD)
        try:
            return frozenset(core for core in cores if not self._is_free(folder, core))
        finally:
            os.close(folder)

    def _is_free(self, folder: int, core: int) -> bool:
        """Returns whether no other stack held the core, which is held afterwards."""
        file = open_private_file(folder, f"core-{core}.lock", FIELD)
        is_free = try_lock(file)
        # Refused only by an exclusive lock: of a stack that looks at this very moment.
        if try_lock(file, shared=True):
            self._held[core] = file
        else:
            os.close(file)
        return is_free

    def keep(self, cores: Iterable[int]) -> None:
        """Give back every claimed core but these."""
        for core in set(self._held) - set(cores):
            os.close(self._held.pop(core))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.keep(())
