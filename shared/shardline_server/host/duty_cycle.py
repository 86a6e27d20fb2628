"""Bounds how much of the interpreter a background thread takes from the thread that computes."""

from __future__ import annotations

import threading
from types import TracebackType

from shardline.base.clock import thread_s


class DutyCycle:
    """A context for each turn of one thread's work. After a turn the thread rests until its work
    was at most `share` of both, for `longest_rest_s` at most.

    One thread at a time runs Python, and the one that wakes takes the interpreter away from the one
    that computes. Work that waits meanwhile is done in fewer and larger turns.
    """

    def __init__(self, *, share: float, longest_rest_s: float) -> None:
        self._rest_per_work = (1.0 - share) / share
        self._longest_rest_s = longest_rest_s
        self._began_s = 0.0
        self._hastened = threading.Event()

    def hasten(self) -> None:
        """Any thread: there is work that must not wait for the end of this rest."""
        self._hastened.set()

    def __enter__(self) -> None:
        self._hastened.clear()
        self._began_s = thread_s()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._hastened.wait(self.rest_s(thread_s() - self._began_s))

    def rest_s(self, work_s: float) -> float:
        """Returns how long the thread rests after a turn with `work_s` seconds of a core."""
        return min(self._longest_rest_s, work_s * self._rest_per_work)
