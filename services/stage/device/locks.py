"""One lock file per core or GPU, in a folder that one user's containers may share. The kernel frees
those of a dead process.

Owns the lock files; knows nothing of what a device is.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from shardline.base.errors import Invalid
from shardline_server.host.lock_file import locked, try_lock
from shardline_server.host.private import open_private_file, open_private_folder

FIELD = "SHARDLINE_LOCK_DIR"
HOLDER_MAX_BYTES = 256


GATE = "gate.lock"
"""Held while device locks are tried: who looks takes a free one for a moment, and must not refuse
it to others."""


def holder(folder: Path, name: str) -> str | None:
    """Returns who holds a lock, or None if it is free."""
    try:
        file = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    with _opened(folder) as opened, _gate(opened):
        try:
            return None if try_lock(file) else _written_holder(file)
        finally:
            os.close(file)


class DeviceLocks:
    """Takes all of the named locks, or none. They are exclusive unless every holder shares them.

    Raises Invalid, naming the holder, if another process holds one of them.
    """

    def __init__(
        self, folder: Path, names: Iterable[str], *, worker: str, shared: bool = False
    ) -> None:
        self._files: list[int] = []
        try:
            with _opened(folder) as opened, _gate(opened):
                for name in sorted(names):
                    self._take(opened, f"{name}.lock", worker, shared)
        except Invalid:
            self.release()
            raise

    def release(self) -> None:
        """Releases the locks. The files stay: removing them would let two processes hold the same
        lock."""
        while self._files:
            os.close(self._files.pop())

    def _take(self, folder: int, name: str, worker: str, shared: bool) -> None:
        file = open_private_file(folder, name, FIELD)
        self._files.append(file)
        if not try_lock(file, shared=shared):
            raise Invalid(
                "SHARDLINE_DEVICE",
                f"{name.removesuffix('.lock')} is held by {_written_holder(file)}",
                "Give this worker another device, stop that one, "
                "or let both share it (SHARDLINE_DEVICE_SHARED=1)",
            )
        # The lock holds even if the name cannot be written: a full disk must not keep a stage from
        # starting.
        with suppress(OSError):
            os.ftruncate(file, 0)
            os.pwrite(
                file,
                f"{worker} (pid {os.getpid()} on {socket.gethostname()})\n".encode()[
                    :HOLDER_MAX_BYTES
                ],
                0,
            )


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """A context with the folder of the locks, made if it is not there. Raises Invalid if it is
    another user's."""
    opened = open_private_folder(folder, FIELD)
    try:
        yield opened
    finally:
        os.close(opened)


def _gate(folder: int) -> AbstractContextManager[None]:
    """A context that excludes others from trying locks: for an instant, since nothing waits
    inside."""
    return locked(open_private_file(folder, GATE, FIELD))


def _written_holder(file: int) -> str:
    return (
        os.pread(file, HOLDER_MAX_BYTES, 0).decode("utf-8", "replace").strip() or "another process"
    )
