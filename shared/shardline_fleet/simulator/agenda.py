"""The virtual clock: what happens next, and when. Knows nothing of what happens."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count


class Agenda:
    """Actions in the order of their times; of equal times the one noted first."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._noted: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        """Notes an action; one that is overdue is next."""
        heappush(self._noted, (max(when_s, self.now_s), next(self._numbers), action))

    def after(self, pause_s: float, action: Callable[[], None]) -> None:
        """Notes an action for `pause_s` seconds from now."""
        self.at(self.now_s + pause_s, action)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Does one action after the other until it is over, or none is left."""
        while self._noted and not is_over():
            self.now_s, _, action = heappop(self._noted)
            action()
