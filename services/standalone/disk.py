"""Warns before the runtime folder's disk is full: server data, logs and sockets are there. Knows no
server."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

MIB = 1 << 20
LOW_BYTES = 1 << 30
"""Postgres alone may need as much for its write-ahead log (max_wal_size)."""


class DiskWatch:
    """One line when less than LOW_BYTES are free, and one when there is room again."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._say = say
        self._is_low = False

    def look(self) -> None:
        """Check once, with one system call."""
        free_bytes = shutil.disk_usage(self._folder).free
        if (free_bytes < LOW_BYTES) is self._is_low:
            return
        self._is_low = not self._is_low
        if self._is_low:
            self._say(
                f"only {free_bytes // MIB} MiB are free in {self._folder}: "
                "make room before Postgres has none"
            )
        else:
            self._say(f"{free_bytes // MIB} MiB are free in {self._folder} again")
