"""Calls into the engine's thread from other threads. Owns the hand-over; knows nothing of what is called."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Inbox:
    """Calls queue here until the engine takes them; `put` wakes it wherever it waits.

    Bounded by its callers: at most one call per seat, per wiring and per heartbeat is outstanding.
    """

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._filled = threading.Event()
        self._wake: Callable[[], None] | None = None

    def put(self, call: Callable[[], None]) -> None:
        """From any thread: run `call` in the engine's thread, soon."""
        self._calls.append(call)
        self._filled.set()
        wake = self._wake
        if wake is not None:
            wake()

    def wake_by(self, wake: Callable[[], None] | None) -> None:
        """While the engine waits elsewhere (in a hop), `wake` interrupts that wait."""
        self._wake = wake

    def take(self) -> None:
        """In the engine's thread: run everything that waits."""
        self._filled.clear()
        while self._calls:
            self._calls.popleft()()

    def wait(self, timeout_s: float) -> None:
        """Until something waits, or `timeout_s` passed."""
        self._filled.wait(timeout_s)
