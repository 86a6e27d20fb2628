"""One user's bulk load: tens of thousands of keyed rows in one call, and the same call again, as
after a lost COMMIT. Most are held back for an hour, and cancelled when the load ends. Knows no
fault.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from uuid import UUID

from shardline.base.errors import Conflict, ShardlineError
from shardline.client import Client
from tests.chaos.load.journal import Asked, Journal
from tests.chaos.load.workload import MARK, Dress, Workload
from tests.chaos.report.finding import Finding

DOOR = "batch"
ROWS_PER_MINUTE = 1_700
ROWS_MAX = 50_000
LIVE_EVERY = 100
"""So many rows for one that is to run now."""
NUMBERS = (0, 2, 4, 6, 8, 10)
"""Short requests of the set."""
HELD_S = 3600.0
CHUNK = 1_000
LOOK_S = 0.5
CANCELLED = frozenset({"cancelled"})

AnswerT = TypeVar("AnswerT")


@dataclass(slots=True, kw_only=True)
class Batch:
    """One thread's."""

    client: Client
    journal: Journal
    workload: Workload
    num_rows: int
    name: str
    stopping: threading.Event
    drained: threading.Event
    is_done: threading.Event = field(default_factory=threading.Event)
    held: list[Asked] = field(default_factory=list)
    """They are not in the journal, which is looked through several times a second."""

    def run(self) -> None:
        """Send it all, twice; hold it; cancel what has not run."""
        ids = self._send()
        if ids:
            again = self._send()
            if again != ids:
                self._complain("duplicated", "submit_many gave other ids for the same keys")
        self.stopping.wait()
        held = [each.id for each in self.held]
        for start in range(0, len(held), CHUNK):
            self._until_answered(partial(self.client.cancel, held[start : start + CHUNK]))
        self._wait_until_cancelled(held)
        self.is_done.set()
        self.drained.wait()

    def _documents(self) -> list[dict[str, Any]]:
        return [
            {
                **self.workload.requests[NUMBERS[index % len(NUMBERS)]],
                "idempotency_key": f"{self.name}-{index}",
                "metadata": MARK,
                "priority": 9,
                "delay_s": HELD_S if index % LIVE_EVERY else 0.0,
            }
            for index in range(self.num_rows)
        ]

    def _send(self) -> Sequence[UUID]:
        """The first time, what was stored becomes known to the journal."""
        documents = self._documents()
        ids = self._until_answered(partial(self.client.submit_many, documents)) or ()
        if ids and not self.held:
            for index, job_id in enumerate(ids):
                number = NUMBERS[index % len(NUMBERS)]
                dress = Dress(fields={"metadata": MARK, "idempotency_key": f"{self.name}-{index}"})
                asked = Asked(
                    id=job_id, number=number, door=DOOR, dress=dress, promised=True, has_row=True
                )
                if index % LIVE_EVERY:
                    asked.ends = CANCELLED
                    self.held.append(asked)
                else:
                    self.journal.ask(asked)
        return ids

    def _wait_until_cancelled(self, held: Sequence[UUID]) -> None:
        for start in range(0, len(held), CHUNK):
            some = held[start : start + CHUNK]
            while not self.drained.wait(LOOK_S):
                jobs = self._until_answered(partial(self.client.get_many, some)) or ()
                if all(job.state.terminal for job in jobs):
                    break

    def _until_answered(self, ask: Callable[[], AnswerT]) -> AnswerT | None:
        """As a careful program does: an unknown answer is asked for again. None: refused, or the
        load is over."""
        while not self.drained.wait(LOOK_S):
            try:
                return ask()
            except Conflict as error:
                self._complain("conflicts", f"an equal submit_many was refused: {error}")
                return None
            except ShardlineError:
                continue
        return None

    def _complain(self, count: str, what: str) -> None:
        self.journal.complain(Finding(invariant="I11", count=count, what=what))
