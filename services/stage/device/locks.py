"""One lock file per core or GPU, in a folder that one user's containers may share. The kernel frees a dead one's locks.

Knows nothing of what a device is.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from shardline.errors import Invalid
from shardline.private import open_private_file, open_private_folder

FIELD = "SHARDLINE_LOCK_DIR"
HOLDER_MAX_BYTES = 256


class DeviceLocks:
    """All of the named locks, or none. Exclusive, unless every holder agrees to share."""

    def __init__(self, folder: Path, names: Iterable[str], *, worker: str, shared: bool = False) -> None:
        self._files: list[int] = []
        opened = open_private_folder(folder, FIELD)
        try:
            for name in sorted(names):
                self._take(opened, f"{name}.lock", worker, shared)
        except Invalid:
            self.release()
            raise
        finally:
            os.close(opened)

    def release(self) -> None:
        """Gives them back. The files stay: removing them would let two holders in."""
        while self._files:
            os.close(self._files.pop())

    def _take(self, folder: int, name: str, worker: str, shared: bool) -> None:
        file = open_private_file(folder, name, FIELD)
        self._files.append(file)
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(file, HOLDER_MAX_BYTES, 0).decode("utf-8", "replace").strip() or "another process"
            raise Invalid(
                "SHARDLINE_DEVICE",
                f"{name.removesuffix('.lock')} is held by {holder}",
                "Give this worker another device, stop that one, or let both share it (SHARDLINE_DEVICE_SHARED=1)",
            ) from error
        # The lock is held without the name: a full disk must not keep a stage from starting.
        with suppress(OSError):
            os.ftruncate(file, 0)
            os.pwrite(file, f"{worker} (pid {os.getpid()} on {socket.gethostname()})\n".encode()[:HOLDER_MAX_BYTES], 0)
