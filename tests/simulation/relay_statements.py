"""Twins of the statements with which relays send, sweep and cancel jobs; see `statements` for those
of claims."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from uuid import UUID

from sqlalchemy.sql import Executable

from shardline.contract.job import DEFAULT_TENANT, JobState
from shardline.contract.tables import JOBS_CHANNEL
from shardline.store import jobs
from shardline.store.connection import notify
from shardline.store.statistics import reports
from shardline_server.store import outbox, sweeps, turns
from shardline_server.store.outbox import MAX_DOUBLINGS
from shardline_server.store.windows import MAX_BATCH, WINDOW_MIN, WINDOW_PER_SEAT
from tests.simulation.rows import Job, Rows, Tables, Twin

# shardline_server.store.outbox
# ----------------------------------------------------------------------------------------------


def take_turn(_tables: Tables) -> Rows:
    """Nobody else stamps at this moment, there is one tenant, and nothing is paused."""
    return [{"is_ours": True, "has_rivals": False, "is_paused": False, "is_held": False}]


def stamp(
    tables: Tables, *, resend_s: float, locked_ids: Collection[UUID], passed_over: Collection[str]
) -> Rows:
    """Those that are due for the first time within their window, or again."""
    now_s = tables.now_s
    queued = sorted(
        (
            job
            for job in tables.jobs.values()
            if job.state is JobState.QUEUED and job.id not in locked_ids
        ),
        key=lambda job: job.order,
    )
    due = [] if passed_over else _within_window(tables, queued)
    turns = {job.id: turn for turn, job in enumerate(due, 1)}
    lost = [
        job
        for job in queued
        if job.sent_s is not None
        and job.sent_s <= now_s - resend_s * 2 ** min(max(job.num_sends - 1, 0), MAX_DOUBLINGS)
    ]
    looked = sorted(due + lost, key=lambda job: (job.priority, turns.get(job.id, 0), job.order))
    stamped = [job for job in looked if job.cancel_s is None and job.id not in tables.locked]
    for job in stamped:
        job.sent_s = now_s
        job.num_sends = job.num_sends + 1
    return [
        {
            "id": job.id,
            "tenant_id": DEFAULT_TENANT if job.id in turns else None,
            "model": job.model,
            "priority": job.priority,
            "num_sends": job.num_sends if job in stamped else None,
            "traceparent": None,
        }
        for job in looked
    ]


def unstamp(tables: Tables, *, ids: Collection[UUID]) -> int:
    """Sending failed."""
    sent = [
        job for job in tables.lock(ids) if job.state is JobState.QUEUED and job.sent_s is not None
    ]
    for job in sent:
        job.sent_s = None
        job.num_sends = max(job.num_sends - 1, 0)
    return len(sent)


def unstamp_sent(tables: Tables) -> int:
    """Redis lost everything."""
    sent = [
        job
        for job in tables.lock(tables.jobs)
        if job.state is JobState.QUEUED and job.sent_s is not None
    ]
    for job in sent[:MAX_BATCH]:
        job.sent_s = None
        job.num_sends = 0
    return len(sent[:MAX_BATCH])


def _urgency(job: Job) -> tuple[int, float, tuple[int, float, int]]:
    """The order of one tenant's jobs: those without a deadline come last of their priority."""
    deadline_s = math.inf if job.deadline_s is None else job.deadline_s
    return job.priority, deadline_s, job.order


def _within_window(tables: Tables, queued: Sequence[Job]) -> list[Job]:
    seats: dict[str, int] = {}
    for row in tables.pipelines.values():
        if row.lease_s > tables.now_s:
            seats[row.model] = seats.get(row.model, 0) + row.seats
    room: dict[tuple[str, int], int] = {}
    due = []
    for job in sorted(queued, key=_urgency):
        line = (job.model, job.priority)
        if line not in room:
            num_out = sum(
                (one.model, one.priority) == line and one.sent_s is not None for one in queued
            )
            room[line] = max(WINDOW_MIN, WINDOW_PER_SEAT * seats.get(job.model, 0)) - num_out
        is_new = job.sent_s is None and job.cancel_s is None and job.model in tables.models
        if is_new and job.not_before_s <= tables.now_s and room[line] > 0:
            room[line] -= 1
            due.append(job)
    return due


# shardline_server.store.sweeps
# ----------------------------------------------------------------------------------------------


def fix_now(_tables: Tables) -> Rows:
    """Time stands still in a transaction."""
    return []


def lock_stopped(tables: Tables, *, max_batch: int) -> Rows:
    """Queued ones that were cancelled or are too late."""
    queued = [job for job in tables.lock(tables.jobs) if job.state is JobState.QUEUED]
    stopped = [
        job.id for job in queued if job.cancel_s is not None or tables.is_past(job.deadline_s)
    ]
    return [{"id": job_id} for job_id in sorted(stopped)[:max_batch]]


def lock_expired(tables: Tables, *, lease_s: float, max_batch: int) -> Rows:
    """Those whose holder was silent for a lease."""
    if not tables.started_s < tables.now_s - lease_s:
        return []
    running = [job for job in tables.lock(tables.jobs) if job.state is JobState.RUNNING]
    expired = [job for job in running if job.lease_s is not None and job.lease_s < tables.now_s]
    tables.audit_leases(expired)
    return [
        {"id": job.id} for job in sorted(expired, key=lambda job: job.lease_s or 0.0)[:max_batch]
    ]


def partials(tables: Tables, *, ids: Collection[UUID], max_bytes: int, num_prompt_end: int) -> Rows:
    """What was saved of each; here that is never too much for one sweep."""
    return [
        {
            "id": job.id,
            "fence": job.fence,
            "model": job.model,
            "params": job.params,
            "max_tokens": job.max_tokens,
            "num_prompt": len(job.prompt_ids),
            "prompt_end": job.prompt_ids[-num_prompt_end:],
            "tokens": tables.attempts[job.id, job.fence].tokens,
            "logprobs": None,
        }
        for job in tables.select(ids)
    ]


# shardline.store.jobs, reports, notify
# --------------------------------------------------------------------------------


def cancel(tables: Tables, *, ids: Collection[UUID], running: bool) -> Rows:
    """What never ran ends at once; all else is asked to."""
    may_change = (JobState.QUEUED, JobState.RUNNING) if running else (JobState.QUEUED,)
    changed = [job for job in tables.select(ids) if job.state in may_change]
    for job in changed:
        job.cancel_s = tables.now_s if job.cancel_s is None else job.cancel_s
        if job.state is JobState.QUEUED and job.fence == 0:
            job.state = JobState.CANCELLED
    return [{"id": job.id, "state": job.state} for job in changed]


def states(tables: Tables, *, ids: Collection[UUID]) -> Rows:
    """Of those that exist."""
    return [{"id": job.id, "state": job.state} for job in tables.select(ids)]


def ring(tables: Tables, *, channel: str, words: Collection[str]) -> Rows:
    """NOTIFY: nobody here waits for ends."""
    if channel == JOBS_CHANNEL:
        tables.ring()
    return []


TWINS: Mapping[Executable, Twin] = {
    turns.TAKE_TURN: take_turn,
    outbox.STAMP: stamp,
    outbox.UNSTAMP: unstamp,
    outbox.UNSTAMP_SENT: unstamp_sent,
    sweeps.FIX_NOW: fix_now,
    sweeps.LOCK_STOPPED: lock_stopped,
    sweeps.LOCK_EXPIRED: lock_expired,
    sweeps.PARTIALS: partials,
    jobs.CANCEL: cancel,
    reports.STATES: states,
    notify.RING: ring,
}
