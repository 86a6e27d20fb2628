"""Jobs that break whatever runs them, among good ones. Each must end `failed` with its history, and
cost a neighbor no more than one crash where it takes the head down, none anywhere else
(docs/guarantees.md)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

import psycopg

from shardline_server.failpoints import Point
from tests.chaos.faults.arming import Arming, arm
from tests.chaos.faults.fault import Broken, Fault, NotInjected
from tests.chaos.load.journal import Asked
from tests.chaos.load.requests import INSERT, row
from tests.chaos.load.workload import PLAIN
from tests.chaos.stack.local_target import LocalTarget

MAX_CRASHES = 2
SEEDS = (1 << 40, 1 << 41)
"""A stage knows a job by its seed: none of the set has one of these."""

NUMBER = 1
"""A greedy request, whose tokens no seed can change."""

HANG_S = 600.0
SPARE_S = 60.0

DOOR = "poison"
ENDS = frozenset({"failed", "succeeded"})
"""Until it has struck often enough."""

NOW = "extract(epoch FROM now())::float8"
DEAD = "SELECT state, crashes, error FROM jobs WHERE id = %s"
NEIGHBORS = """
SELECT job_id, count(*) FROM attempts
WHERE outcome = 'crashed' AND job_id <> %s AND started_at >= to_timestamp(%s)
GROUP BY job_id HAVING count(*) > %s
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Poison:
    """What becomes of the process that meets the job, each time."""

    what: str
    action: str
    is_at_head: bool = False
    point: Point = Point.MID_PREFILL
    num_crashes: int = MAX_CRASHES
    """At its end."""

    @property
    def kind(self) -> str:
        """Its name in chaos.json."""
        return f"poison: {self.what}"

    @property
    def is_kill(self) -> bool:
        """A process dies of it: by itself, or told to."""
        return self.num_crashes > 0

    def missing(self, target: LocalTarget) -> str | None:
        """A pipeline of one stage is its head, and encoders have no logits."""
        if self.point is Point.NAN_LOGITS and not target.workload.generates:
            return "encoders have no logits"
        if target.num_stages == 1 and not self.is_at_head and self.point is Point.MID_PREFILL:
            return "a pipeline of one stage has no stage behind the head"
        return None

    def strike(self, target: LocalTarget, rng: random.Random) -> None:
        """Returns when the job has ended; it is judged with the others, what it cost them here."""
        seed = rng.randrange(*SEEDS)
        arming = self._arm(target, rng, seed)
        try:
            job_id, since_s = _submit(target, seed)
            asked = target.journal.ask(
                Asked(id=job_id, number=NUMBER, door=DOOR, ends=ENDS, promised=True)
            )
            has_ended = target.journal.wait_for(job_id, limit_s := _limit_s(target))
        finally:
            arming.disarm()
        if arming.num_strikes == 0:
            raise NotInjected("nobody met the job")
        if not has_ended or arming.num_strikes < self.num_crashes:
            raise Broken(
                f"job {job_id} struck {arming.num_strikes} times in {limit_s:.0f} s,"
                f" and has ended: {has_ended}"
            )
        asked.ends = frozenset({"failed"})
        with psycopg.connect(target.database_url) as connection:
            self._check_end(connection, job_id)
            self._check_neighbors(connection, job_id, since_s)

    def _arm(self, target: LocalTarget, rng: random.Random, seed: int) -> Arming:
        facts = {"seed": seed}
        if self.point is Point.MID_PREFILL:
            facts["place"] = self._place(target, rng)
        return arm(
            target.failpoints, self.point, self.action, when=facts, pause_s=HANG_S, times=None
        )

    def _place(self, target: LocalTarget, rng: random.Random) -> int:
        if self.is_at_head:
            return 0
        # A fleet may have other stages by now than when it was asked what is missing.
        num_stages = target.num_stages
        if num_stages == 1:
            raise NotInjected("no pipeline has a stage behind its head now")
        return rng.randrange(1, num_stages)

    def _check_end(self, connection: psycopg.Connection[Any], job_id: UUID) -> None:
        ((state, num_crashes, error),) = connection.execute(DEAD, (job_id,)).fetchall()
        if self.num_crashes == 0:
            as_it_should = num_crashes == 0 and error is not None and error["code"] == "engine"
        else:
            as_it_should = (
                error is not None and error["code"] == "crashed" and _has_history(error["attempts"])
            )
        if state == "failed" and not as_it_should:
            raise Broken(f"job {job_id} failed with {num_crashes} crashes and the error {error}")

    def _check_neighbors(
        self, connection: psycopg.Connection[Any], job_id: UUID, since_s: float
    ) -> None:
        max_crashes = 1 if self.is_at_head else 0
        if hurt := connection.execute(NEIGHBORS, (job_id, since_s, max_crashes)).fetchall():
            told = ", ".join(f"{neighbor} {number}" for neighbor, number in hurt)
            raise Broken(
                f"job {job_id} may cost each neighbor {max_crashes} crashes, it cost {told}"
            )


def _limit_s(target: LocalTarget) -> float:
    """Every crash costs a lease or a stall, a restart, and a claim that waits for the neighbors'
    tokens. Twice: others use the machine too."""
    once_s = target.times.lease_s + target.times.stall_s + target.start_s
    return SPARE_S + 2 * MAX_CRASHES * once_s


def _submit(target: LocalTarget, seed: int) -> tuple[UUID, float]:
    """First in its line; committed when it returns, with Postgres's time of it."""
    job_id = uuid4()
    fields = {
        **target.workload.requests[NUMBER],
        **PLAIN.fields,
        "seed": seed,
        "max_crashes": MAX_CRASHES,
        "priority": 0,
    }
    with psycopg.connect(target.database_url) as connection:
        ((now_s,),) = connection.execute(
            f"{INSERT} RETURNING {NOW}", row(fields, job_id)
        ).fetchall()
    return job_id, float(now_s)


def _has_history(attempts: Sequence[Mapping[str, Any]]) -> bool:
    """As many attempts as crashes, each with who made it."""
    return len(attempts) >= MAX_CRASHES and all(attempt["worker"] for attempt in attempts)


FAULTS: tuple[Fault, ...] = (
    Poison(what="kills the head", action="kill", is_at_head=True),
    Poison(what="kills a later stage", action="kill"),
    Poison(what="raises in the head", action="raise", is_at_head=True),
    Poison(what="raises in a later stage", action="raise"),
    Poison(what="hangs the head", action="pause", is_at_head=True),
    Poison(what="hangs a later stage", action="pause"),
    Poison(what="logits that are no numbers", action="nan", point=Point.NAN_LOGITS, num_crashes=0),
)
