"""Interrupts a thread that waits in a poll. Owns one socket pair; knows no thread."""

from __future__ import annotations

import contextlib
import socket
import threading


class Wakeup:
    """A descriptor that any thread can make readable: `wake` makes `fd` readable until `clear`."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._lock = threading.Lock()
        self._is_open = True

    @property
    def fd(self) -> int:
        """The descriptor to poll for reading."""
        return self._reader.fileno()

    def wake(self) -> None:
        """Makes `fd` readable. May be called from any thread; after `close` it does nothing."""
        # Without the lock a late call could write into a file that reuses the closed descriptor's
        # number.
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._is_open:
                self._writer.send(b"\0")

    def clear(self) -> bool:
        """Makes `fd` unreadable again; returns whether `wake` was called since the last `clear`."""
        with contextlib.suppress(BlockingIOError):
            return bool(self._reader.recv(4096))
        return False

    def close(self) -> None:
        """Closes the socket pair. May be called twice."""
        with self._lock:
            self._is_open = False
            self._reader.close()
            self._writer.close()
