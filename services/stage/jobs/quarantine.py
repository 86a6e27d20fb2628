"""Which of the offered jobs a head may claim now, and which of those may begin: within its seats
and its KV, and so that a poison job costs no other job a crash. Knows no Postgres.

A *quarantined* job is one that an engine died under before. It is claimed once all jobs that live
here have saved a token, and until it has too, no other is: so what it breaks is counted a crash of
no other job. Neither side waits for ever.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from services.stage.celery.delivery import Delivery
from services.stage.jobs.live_job import LiveJob
from shardline.contract.job import INTERACTIVE
from shardline.store.connection.encoding import Key
from shardline_scheduler.kv_blocks import blocks_for
from shardline_scheduler.parking import fits
from shardline_server.store.claims import ClaimedJob

PATIENCE_BEATS = 0.5
"""A quarantined job has waited for this many heartbeats: nothing else is claimed, so that live jobs
get to a token."""

OVERDUE_BEATS = 1
"""They have not all got there, and steps are made: a long prompt is no reason to wait, the
quarantined job is claimed now. Each heartbeat looks, so that is within two of its arrival."""

ISOLATED_STEPS = 16
"""A quarantined job with a long prompt has run alone for this many steps: others are claimed next
to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seats:
    """Places in the batch: for any job, and beyond them for interactive ones alone."""

    num_any: int
    num_interactive: int

    @property
    def num_all(self) -> int:
        """The whole batch."""
        return self.num_any + self.num_interactive

    def has_room(self, priority: int, num_taken: int) -> bool:
        """Whether one more may sit down."""
        return num_taken < (self.num_all if priority in INTERACTIVE else self.num_any)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimContext:
    """What a decision is made on, apart from the deliveries."""

    live: Collection[LiveJob]
    now_s: float
    heartbeat_s: float
    num_steps: int
    """Of this epoch, so far."""
    is_moving: bool
    """A step was made of late: who waits, waits for others' prompts and not for an engine that
    hangs."""


def claimable(
    deliveries: Sequence[Delivery], quarantined: Sequence[str], seats: Seats, context: ClaimContext
) -> list[Delivery]:
    """Those to claim now, the best priority first. `quarantined` are job ids, in their order."""
    num_taken = len(context.live)
    unsaved = [job for job in context.live if job.is_unsaved]
    if any(
        job.is_quarantined and context.num_steps - job.began_step < ISOLATED_STEPS
        for job in unsaved
    ):
        return []
    quarantined_ids = set(quarantined)
    ready = [
        one
        for one in deliveries
        if one.job_id in quarantined_ids and seats.has_room(one.priority, num_taken)
    ]
    if ready:
        waited_beats = (context.now_s - min(one.began_s for one in ready)) / context.heartbeat_s
        if not unsaved or (waited_beats >= OVERDUE_BEATS and context.is_moving):
            return [min(ready, key=lambda one: quarantined.index(one.job_id))]
        if waited_beats >= PATIENCE_BEATS:
            return []
    chosen: list[Delivery] = []
    for one in sorted(deliveries, key=lambda one: one.priority):
        if one.job_id not in quarantined_ids and seats.has_room(
            one.priority, num_taken + len(chosen)
        ):
            chosen.append(one)
    return chosen


def beginnable(called: Sequence[LiveJob], context: ClaimContext) -> list[LiveJob]:
    """Those of the parked jobs there is room for that may begin now: as if they were claimed now.
    They have seats."""
    quarantined = [job.delivery.job_id for job in called if job.is_quarantined]
    enough = Seats(num_any=len(context.live) + len(called), num_interactive=0)
    chosen = {
        one.job_id
        for one in claimable([job.delivery for job in called], quarantined, enough, context)
    }
    return [job for job in called if job.delivery.job_id in chosen]


def without_room(
    rows: Sequence[ClaimedJob], live: Collection[LiveJob], num_blocks: int
) -> set[Key]:
    """Those of the rows just claimed that wait for KV: the first that does not fit, and all behind
    it."""
    begun = [job.num_known for job in live if not job.parked]
    num_free = num_blocks - sum(map(blocks_for, begun))
    has_room = len(begun) == len(live)
    for number, row in enumerate(rows, start=len(begun)):
        num_tokens = len(row.prompt_ids) + len(row.output_ids)
        has_room = has_room and fits(num_tokens, num_free, number)
        if not has_room:
            return {(each.job_id, each.fence) for each in rows[number - len(begun) :]}
        num_free -= blocks_for(num_tokens)
    return set()
