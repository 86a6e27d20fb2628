"""Calls into Celery's thread from other threads, waking its event loop. Knows nothing of what is called."""

from __future__ import annotations

import collections
import contextlib
import os
import select
from collections.abc import Callable


class HubCalls:
    """Calls that wait for Celery's thread; `fd` is readable as soon as one does.

    Bounded by its users: two calls per delivery, one delivery per seat, one call per change of the pipeline's state.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._calls: collections.deque[Callable[[], None]] = collections.deque()

    def post(self, call: Callable[[], None]) -> None:
        """From any thread: run `call` in Celery's thread, soon."""
        self._calls.append(call)
        os.eventfd_write(self.fd, 1)

    def take(self) -> None:
        """In Celery's thread: run everything that waits, in order."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        while self._calls:
            self._calls.popleft()()

    def wait(self, timeout_s: float) -> None:
        """In Celery's thread, when its event loop no longer polls: until a call waits, or `timeout_s` passed."""
        select.select([self.fd], [], [], timeout_s)
