"""Deliveries that wait for a claim, in order of arrival. Knows no rows: which may be claimed is not
decided here."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from services.stage.celery.delivery import Delivery


class ClaimQueue:
    """`put` is for Celery's thread, all else for the lease manager's. Bounded by the pool: one
    delivery a seat."""

    def __init__(self) -> None:
        self._arrived: deque[Delivery] = deque()
        self._waiting: list[Delivery] = []
        self._asked_again = False

    def __bool__(self) -> bool:
        """Whether there is anything new to ask."""
        return bool(self._arrived) or (self._asked_again and bool(self._waiting))

    def put(self, delivery: Delivery) -> None:
        """A message arrived."""
        self._arrived.append(delivery)

    def take(self) -> list[Delivery]:
        """All of them, the oldest first."""
        taken = self._waiting
        self._waiting = []
        self._asked_again = False
        while self._arrived:
            taken.append(self._arrived.popleft())
        return taken

    def put_back(self, deliveries: Iterable[Delivery]) -> None:
        """Taken, and not claimed now: they come first when they are asked for again, or with the
        next that arrives."""
        self._waiting.extend(deliveries)

    def again(self) -> None:
        """Something has changed: what waits may be asked for once more."""
        self._asked_again = True
