"""Owns the memory that the stages of one host have promised to take and not taken yet. Knows no
model and no device.

Free memory does not show a stage that is still loading: two that measure it at the same time would
both take it. So each stage writes what it will need into its own file, next to the device locks,
and subtracts what others have written. A lock on the file shows that its writer is alive.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from uuid import uuid4

from shardline_server.host.cgroup import memory_group
from shardline_server.host.lock_file import locked, try_lock

PATTERN = "memory-*.promise"
DRAFT = "memory.draft"
"""A promise that is made: of one process at a time."""
MAX_BYTES = 64


class MemoryReservations:
    """The promise of this process, and those of all processes that share `folder`; containers of
    one host may."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o777, parents=True, exist_ok=True)
        self._folder = folder
        self._cgroup = memory_group()
        self._path = folder / f"memory-{uuid4().hex}.promise"
        draft = folder / DRAFT
        with self.alone():
            # It gets its name once it is locked: who reads an unlocked one removes it, as that of a
            # dead process.
            self._file = _open(draft)
            try_lock(self._file)
            self.make(0)
            draft.rename(self._path)

    def make(self, num_bytes: int) -> None:
        """Promises to take this memory, in place of any earlier promise; 0 once it is taken."""
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{num_bytes} {self._cgroup}".encode(), 0)

    def others(self, *, same_cgroup: bool = False) -> int:
        """Returns the bytes that other living processes promise to take; with `same_cgroup`, those
        under our limit."""
        found = [self._read(path) for path in self._folder.glob(PATTERN) if path != self._path]
        return sum(
            num_bytes for num_bytes, cgroup in found if not same_cgroup or cgroup == self._cgroup
        )

    def alone(self) -> AbstractContextManager[None]:
        """A context that excludes other stages from measuring and promising. Keep it short: read no
        weights inside."""
        return locked(_open(self._folder / "memory.lock"))

    def release(self) -> None:
        """Withdraws the promise of this process and removes its file."""
        with suppress(FileNotFoundError):
            self._path.unlink()
        os.close(self._file)

    def _read(self, path: Path) -> tuple[int, int]:
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return 0, 0
        try:
            if try_lock(file, shared=True):
                path.unlink(missing_ok=True)  # Its writer is dead.
                return 0, 0
            words = os.pread(file, MAX_BYTES, 0).split()
            return (
                (int(words[0]), int(words[1]))
                if len(words) == 2 and all(map(bytes.isdigit, words))
                else (0, 0)
            )
        finally:
            os.close(file)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
