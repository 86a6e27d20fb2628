"""Tickets that wait for a claim, first come, first taken. Knows no rows: who may be claimed is not decided here."""

from __future__ import annotations

from collections import deque

from services.stage.worker.ticket import Ticket

CLAIM_BATCH = 64


class Offers:
    """`put` is for Celery's thread, all else for the ledger's."""

    def __init__(self) -> None:
        self._tickets: deque[Ticket] = deque()
        self._held_back: deque[Ticket] = deque()
        """They wait for a suspect, see `isolation`."""

    def __bool__(self) -> bool:
        return bool(self._tickets)

    def put(self, ticket: Ticket) -> None:
        """A message arrived."""
        self._tickets.append(ticket)

    def take(self) -> list[Ticket]:
        """The oldest, as many as one transaction claims."""
        return [self._tickets.popleft() for _ in range(min(len(self._tickets), CLAIM_BATCH))]

    def put_back(self, tickets: list[Ticket]) -> None:
        """Taken, but nothing is known of them yet: first again."""
        self._tickets.extendleft(reversed(tickets))

    def hold_back(self, ticket: Ticket) -> None:
        """Not to be claimed before `again`."""
        self._held_back.append(ticket)

    def again(self) -> None:
        """What was held back may be asked for once more."""
        self._tickets.extend(self._held_back)
        self._held_back.clear()
