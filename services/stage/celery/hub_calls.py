"""Calls into Celery's thread from other threads, waking its event loop. Knows nothing of what is
called."""

from __future__ import annotations

import collections
import select
from collections.abc import Callable

from services.stage.hop.wakeup import Wakeup


class HubCalls:
    """Calls that wait for Celery's thread; `fd` is readable as soon as one does.

    Bounded by its users: two calls per delivery, one delivery per seat, one call per change of the
    pipeline's state.
    """

    def __init__(self, wakeup: Wakeup) -> None:
        self._wakeup = wakeup
        self._calls: collections.deque[Callable[[], None]] = collections.deque()

    @property
    def fd(self) -> int:
        """The descriptor to poll for reading."""
        return self._wakeup.fd

    def post(self, call: Callable[[], None]) -> None:
        """Runs `call` in Celery's thread, soon. Any thread may call this."""
        self._calls.append(call)
        self._wakeup.wake()

    def take(self) -> None:
        """Runs everything that waits, in order. Called in Celery's thread."""
        self._wakeup.clear()
        while self._calls:
            self._calls.popleft()()

    def wait(self, timeout_s: float) -> None:
        """Waits until a call waits, or `timeout_s` passed. Called in Celery's thread, when its
        event loop no longer polls."""
        select.select([self.fd], [], [], timeout_s)
