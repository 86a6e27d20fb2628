"""One door's producer: keeps a bounded number of jobs open, and sends again what may have been lost
on its way.

A user's producer also sends again what it need not, at once or after the end, and what the door did
not answer: each must give the job that is there. Knows no fault and no row.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from uuid import uuid4

from shardline.base.errors import Conflict
from tests.chaos.load.doors import AWAY, Answer, Door, is_refusal, told_by
from tests.chaos.load.journal import Asked, Journal
from tests.chaos.load.workload import Workload
from tests.chaos.report.finding import Finding

OPEN_PER_DOOR = 5
AGAIN_S = 5.0
"""A request without a row, or without an answer, is sent again under the same id or key so
often."""

LOOK_S = 0.2
REPEATED = 0.02
"""Share of looks at which a user sends one of the last requests again for no reason: about once in
ten seconds."""
NUM_REMEMBERED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Producer:
    """One thread's."""

    name: str
    door: Door
    journal: Journal
    workload: Workload
    numbers: Iterator[int]
    stopping: threading.Event
    drained: threading.Event
    lasts: bool
    """What the door has taken cannot be lost: nothing is sent twice."""
    rng: random.Random
    last: deque[Asked] = field(default_factory=lambda: deque(maxlen=NUM_REMEMBERED))

    def run(self) -> None:
        """Until the load has drained."""
        while not self.drained.wait(LOOK_S):
            waiting = self.journal.open(self.name)
            for asked in waiting:
                if self._wants_again(asked):
                    self.send(asked)
            if len(waiting) < OPEN_PER_DOOR and not self.stopping.is_set():
                self.send(self._next())
            if (
                self.last
                and self.workload.is_users
                and not self.lasts
                and self.rng.random() < REPEATED
            ):
                self.send(self.rng.choice(self.last))

    def send(self, asked: Asked) -> None:
        """Once. What the door says of it goes into the journal."""
        asked.asked_s = time.monotonic()
        asked.num_sends += 1
        fields = self.workload.dressed(asked.number, asked.dress)
        asked.is_unsure = True
        try:
            self._hear(asked, self.door(asked.own_id, fields))
        except Conflict as error:
            what = f"{self.name} refused an equal request, sent {asked.num_sends} times: {error}"
            self._complain("conflicts", what, asked)
        except AWAY as error:
            asked.num_unanswered += 1
            if is_refusal(error):
                what = f"{self.name} refused a good request: {told_by(error)}"
                self._complain("refused", what, asked)
            return
        asked.is_unsure = False

    def _next(self) -> Asked:
        dress = self.workload.dress(self.rng)
        asked = Asked(
            id=uuid4(), number=next(self.numbers), door=self.name, dress=dress, ends=dress.ends
        )
        self.last.append(asked)
        return self.journal.ask(asked)

    def _wants_again(self, asked: Asked) -> bool:
        """Redis lost it perhaps, or its door did not answer."""
        if time.monotonic() - asked.asked_s <= AGAIN_S or (self.lasts and asked.promised):
            return False
        return not asked.has_row or (asked.is_unsure and self.workload.is_users)

    def _hear(self, asked: Asked, answer: Answer) -> None:
        was_promised = asked.promised
        asked.promised |= answer.job_id is not None or self.lasts
        if answer.job_id is None:
            return
        if answer.job_id != asked.id and (
            was_promised or asked.has_row or asked.own_id is not None
        ):
            what = f"{self.name} answered a repeat with another job, {answer.job_id}"
            self._complain("duplicated", what, asked)
            return
        if answer.is_new and was_promised:
            self._complain(
                "mistold", f"{self.name} called a job new that it had accepted before", asked
            )
        self.journal.known(asked, answer.job_id)

    def _complain(self, count: str, what: str, asked: Asked) -> None:
        self.journal.complain(Finding(invariant="I11", count=count, what=what, job_id=asked.id))
