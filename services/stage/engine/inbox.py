"""Passes calls from other threads to the engine's thread. Owns the hand-over; knows nothing of what
is called."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Inbox:
    """Holds calls until the engine runs them; `put` wakes the engine wherever it waits.

    Bounded by its callers: at most one call per seat, per wiring, per heartbeat and per launched
    step is outstanding.
    """

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._filled = threading.Event()
        self._wake: Callable[[], None] | None = None

    def put(self, call: Callable[[], None]) -> None:
        """Runs `call` in the engine's thread, soon. May be called from any thread."""
        self._calls.append(call)
        self._filled.set()
        wake = self._wake
        if wake is not None:
            wake()

    def wake_by(self, wake: Callable[[], None] | None) -> None:
        """Sets what interrupts the engine's wait in a hop; None if it waits here only."""
        self._wake = wake

    def take(self) -> None:
        """Runs all waiting calls. Called in the engine's thread."""
        self._filled.clear()
        while self._calls:
            self._calls.popleft()()

    def wait(self, timeout_s: float) -> None:
        """Blocks until a call waits or `timeout_s` has passed. Called in the engine's thread."""
        self._filled.wait(timeout_s)
