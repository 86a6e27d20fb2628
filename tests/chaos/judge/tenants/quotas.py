"""Whether a tenant's quotas held at every moment, and what was reserved was settled once. Knows no
server: it is given rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from uuid import UUID

from tests.chaos.judge.tenants.rows import Row
from tests.chaos.load.tenants.ledger import PRICE

WINDOW = timedelta(seconds=60)
MILLION = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaTrial:
    """One tenant with a quota, when all of its jobs have ended."""

    limits: Mapping[str, int]
    jobs: Sequence[Row]
    moves: Sequence[Row]
    use: Row | None
    refused: Sequence[UUID]

    def problems(self) -> Iterator[str]:
        """Yields what is wrong."""
        yield from self._at_every_moment()
        yield from self._in_every_minute()
        yield from self._at_the_end()
        ids = {job["id"] for job in self.jobs}
        for job_id in self.refused:
            if job_id in ids:
                yield f"job {job_id} was refused, and is there"

    def _at_every_moment(self) -> Iterator[str]:
        """Jobs that run; and those that wait for their first claim, whenever one is accepted: what
        a head gives back is no new one, and may be beyond the limit."""
        running: set[UUID] = set()
        waiting: set[UUID] = set()
        most_running = most_waiting = 0
        for move in self.moves:
            job_id = move["job_id"]
            waiting.discard(job_id)
            running.discard(job_id)
            if move["new"] == "running":
                running.add(job_id)
                most_running = max(most_running, len(running))
            elif move["old"] is None and move["new"] == "queued":
                waiting.add(job_id)
                most_waiting = max(most_waiting, len(waiting))
        for name, most in (("max_running", most_running), ("max_queued", most_waiting)):
            if most > self.limits[name]:
                yield f"{name} is {self.limits[name]}, and there were {most}"

    def _in_every_minute(self) -> Iterator[str]:
        """A request was counted between the beginning of its transaction and its row: only what was
        surely within a minute counts."""
        limit = self.limits["requests_per_min"]
        new = sorted((move["at"], move["began_at"]) for move in self.moves if move["old"] is None)
        for place in range(len(new) - limit):
            among = new[place : place + limit + 1]
            took = among[-1][0] - min(began_at for _, began_at in among)
            if took < WINDOW:
                yield f"requests_per_min is {limit}, and {limit + 1} came in {took}"
                return

    def _at_the_end(self) -> Iterator[str]:
        if self.use is None:
            yield "its quota is gone"
            return
        if any(job["finished_at"] is None for job in self.jobs):
            return
        for name in ("queued", "bytes", "open_tokens", "open_money", "num_reserved"):
            if self.use[name]:
                yield f"all jobs have ended, and {name} is {self.use[name]}"
        num_in = sum(job["prompt_tokens"] or 0 for job in self.jobs)
        num_out = sum(job["completion_tokens"] or 0 for job in self.jobs)
        price_in, price_out = map(Decimal, PRICE)
        for name, wanted in (
            ("spent_tokens", num_in + num_out),
            ("spent_money", (num_in * price_in + num_out * price_out) / MILLION),
        ):
            if self.use[name] != wanted:
                yield f"{name} is {self.use[name]}, results have {wanted}"
        for name in ("tokens", "money"):
            if self.use[f"spent_{name}"] > self.limits[f"budget_{name}"]:
                yield f"budget_{name} is exceeded: {self.use[f'spent_{name}']}"
