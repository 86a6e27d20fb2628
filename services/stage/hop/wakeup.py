"""Interrupts a thread that waits in a poll. Owns one socket pair; knows nobody who waits."""

from __future__ import annotations

import contextlib
import socket
import threading


class Wakeup:
    """`wake` from any thread makes `fd` readable until `clear`."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._lock = threading.Lock()
        self._is_open = True

    @property
    def fd(self) -> int:
        """To poll for reading."""
        return self._reader.fileno()

    def wake(self) -> None:
        """Any thread, any time; after `close` it does nothing."""
        # The lock keeps a late call from writing into whatever took over the closed descriptor.
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._is_open:
                self._writer.send(b"\0")

    def clear(self) -> bool:
        """True when it was woken since the last call."""
        with contextlib.suppress(BlockingIOError):
            return bool(self._reader.recv(4096))
        return False

    def close(self) -> None:
        """May be called twice."""
        with self._lock:
            self._is_open = False
            self._reader.close()
            self._writer.close()
