"""The functions of `shardline.store` that heads and relays use, over tables in memory: the same conditional updates.

`tests/conformance/test_rows.py` runs the same random operations here and on a real Postgres. A transaction is one
statement here: that rows are locked in a fixed order is the store's own tests' business.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from uuid import UUID

from shardline.job import FinishReason, JobState, Result, Usage
from shardline.store.claims import Claimant, Claimed
from shardline.store.encoding import Key
from shardline.store.ends import End
from shardline.store.leases import Beat, BeatReply
from shardline.store.outbox import MAX_BATCH, MAX_DOUBLINGS, WINDOW_MIN, WINDOW_PER_SEAT, Send
from shardline.store.sweeps import Decode, Partial
from tests.simulation.rows import Attempt, Connection, Job, PipelineRow, Tables

__all__ = ["MAX_BATCH"]

# shardline.store.claims ----------------------------------------------------------------------------------------------


def claim(
    connection: Connection,
    ids: Collection[UUID | str],
    claimant: Claimant,
    *,
    lease_s: float,
    exact_wait_s: float,
    with_quarantined: bool = True,
) -> list[Claimed]:
    """See shardline.store.claims."""
    tables, row = connection.tables, connection.tables.pipelines.get(claimant.pipeline)
    exactness = claimant.exactness
    wanted = {UUID(str(job_id)) for job_id in ids}
    jobs = sorted((job for job_id in wanted if (job := tables.jobs.get(job_id))), key=lambda job: job.order)
    claimed = []
    for job in jobs:
        if (
            row is None
            or row.epoch != claimant.epoch
            or not _is_claimable(connection, job, row, exactness, exact_wait_s)
        ):
            continue
        if job.crashes > 0 and not with_quarantined:
            continue
        before = tables.attempts.get((job.id, job.fence))
        tokens = before.tokens if before else ()
        job.state, job.fence = JobState.RUNNING, job.fence + 1
        job.worker, job.pipeline = claimant.worker, claimant.pipeline
        job.exact = job.exact and job.exactness in (None, exactness) and row.exact
        job.exactness = job.exactness or exactness
        tables.grant(job, connection.now_s + lease_s)
        tables.attempts[job.id, job.fence] = Attempt(
            pipeline=claimant.pipeline, epoch=claimant.epoch, tokens=tokens, num_resumed=len(tokens)
        )
        claimed.append(_claimed(connection, job, tokens))
    return claimed


def postpone_too_long(
    connection: Connection, ids: Collection[UUID | str], *, pipeline: str, wait_s: float
) -> set[UUID]:
    """See shardline.store.claims."""
    tables, row = connection.tables, connection.tables.pipelines.get(pipeline)
    jobs = [job for job_id in ids if (job := tables.jobs.get(UUID(str(job_id))))]
    postponed = set()
    for job in jobs:
        if row and job.state is JobState.QUEUED and job.model == row.model and _is_too_long(tables, job, row):
            job.not_before_s, job.sent_s, job.num_sends = connection.now_s + wait_s, None, 0
            postponed.add(job.id)
    return postponed


def park(connection: Connection, keys: Collection[Key]) -> None:
    """See shardline.store.claims."""
    for key in keys:
        if (attempt := connection.tables.attempts.get(key)) is not None:
            attempt.parked = True


def begin_held(connection: Connection, keys: Collection[Key]) -> set[UUID]:
    """See shardline.store.claims."""
    tables, begun = connection.tables, set()
    for job_id, fence in keys:
        job = tables.jobs.get(job_id)
        if job is not None and _holds(job, fence, JobState.RUNNING):
            tables.attempts[job_id, fence].parked = False
            begun.add(job_id)
    return begun


# shardline.store.leases ----------------------------------------------------------------------------------------------


def heartbeat(connection: Connection, beats: Sequence[Beat], *, lease_s: float) -> dict[Key, BeatReply]:
    """See shardline.store.leases."""
    tables, replies = connection.tables, {}
    for beat in beats:
        job = tables.jobs.get(beat.job_id)
        if job is None or not _holds(job, beat.fence, JobState.RUNNING):
            continue
        saved = tables.attempts[job.id, job.fence].tokens
        if len(saved) < beat.start:
            continue
        tables.audit(job, beat.fence, "heartbeat")
        tables.grant(job, connection.now_s + lease_s)
        if beat.ids:
            tables.save((job.id, job.fence), saved[: beat.start] + beat.ids)
        replies[job.id, job.fence] = BeatReply(
            cancel_requested=job.cancel_s is not None, expired=_is_past(connection, job.deadline_s)
        )
    return replies


def expire_held_by(connection: Connection, *, worker: str, pipeline: str) -> int:
    """See shardline.store.leases."""
    mine = [job for job in connection.tables.jobs.values() if (job.worker, job.pipeline) == (worker, pipeline)]
    held = [job for job in mine if job.state is JobState.RUNNING and (job.lease_s or 0.0) > connection.now_s]
    for job in held:
        connection.tables.cut_short(job)
    return len(held)


# shardline.store.ends ------------------------------------------------------------------------------------------------


def end_running(connection: Connection, ends: Sequence[End]) -> dict[UUID, JobState]:
    """See shardline.store.ends."""
    return _end(connection, ends, JobState.RUNNING)


def end_queued(connection: Connection, ends: Sequence[End]) -> dict[UUID, JobState]:
    """See shardline.store.ends."""
    return _end(connection, ends, JobState.QUEUED)


def release_running(connection: Connection, keys: Collection[Key]) -> set[UUID]:
    """See shardline.store.ends."""
    return requeue_running(connection, keys, outcome="released")


def requeue_running(connection: Connection, keys: Collection[Key], *, outcome: str) -> set[UUID]:
    """See shardline.store.ends."""
    tables, requeued = connection.tables, set()
    for job_id, fence in keys:
        job = tables.jobs.get(job_id)
        if job is None or not _holds(job, fence, JobState.RUNNING):
            continue
        tables.audit(job, fence, outcome)
        tables.attempts[job_id, job.fence].outcome = outcome
        job.state, job.crashes = JobState.QUEUED, {"crashed": job.crashes + 1, "lost": 0}.get(outcome, job.crashes)
        job.lease_s = job.worker = job.pipeline = job.sent_s = None
        job.requeued_s, job.num_sends = connection.now_s, 0
        requeued.add(job_id)
    if requeued:
        tables.ring()
    return requeued


def _end(connection: Connection, ends: Sequence[End], left: JobState) -> dict[UUID, JobState]:
    tables, ended = connection.tables, {}
    for one in ends:
        job = tables.jobs.get(one.job_id)
        if job is not None and _holds(job, one.fence, left):
            tables.end(job, one)
            ended[job.id] = one.state
    for one in ends:
        job = tables.jobs.get(one.job_id)
        if job is not None and one.job_id not in ended and job.fence == one.fence and job.state.terminal:
            ended[job.id] = job.state
    return ended


# shardline.store.outbox ----------------------------------------------------------------------------------------------


def stamp_due(connection: Connection, *, resend_s: float) -> list[Send]:
    """See shardline.store.outbox."""
    tables, now_s = connection.tables, connection.now_s
    queued = sorted((job for job in tables.jobs.values() if job.state is JobState.QUEUED), key=lambda job: job.order)
    due = _within_window(tables, queued, now_s)
    lost = [
        job
        for job in queued
        if job.sent_s is not None
        and job.sent_s <= now_s - resend_s * 2 ** min(max(job.num_sends - 1, 0), MAX_DOUBLINGS)
    ]
    stamped = sorted((job for job in due + lost if job.cancel_s is None), key=lambda job: job.order)
    for job in stamped:
        job.sent_s, job.num_sends = now_s, job.num_sends + 1
    return [
        Send(job_id=job.id, model=job.model, priority=job.priority, num_sends=job.num_sends, traceparent=None)
        for job in stamped
    ]


def unstamp(connection: Connection, ids: Collection[UUID]) -> None:
    """See shardline.store.outbox."""
    for job_id in ids:
        job = connection.tables.jobs.get(job_id)
        if job is not None and job.state is JobState.QUEUED and job.sent_s is not None:
            job.sent_s, job.num_sends = None, max(job.num_sends - 1, 0)


def unstamp_sent(connection: Connection) -> int:
    """See shardline.store.outbox."""
    sent = [job for job in connection.tables.jobs.values() if job.state is JobState.QUEUED and job.sent_s is not None]
    for job in sent:
        job.sent_s, job.num_sends = None, 0
    return len(sent)


# shardline.store.sweeps ----------------------------------------------------------------------------------------------


def sweep_stopped_queued(connection: Connection, decode: Decode) -> dict[UUID, str]:
    """See shardline.store.sweeps."""
    over = [
        job
        for job in connection.tables.jobs.values()
        if job.state is JobState.QUEUED and (job.cancel_s is not None or _is_past(connection, job.deadline_s))
    ]
    return {**end_queued(connection, _stopped(connection, over, decode))}


def sweep_expired_leases(connection: Connection, decode: Decode, *, lease_s: float) -> dict[UUID, str]:
    """See shardline.store.sweeps."""
    tables = connection.tables
    moved: dict[UUID, str] = {}
    if not tables.started_s < connection.now_s - lease_s:
        return moved
    expired = [
        job
        for job in tables.jobs.values()
        if job.state is JobState.RUNNING and job.lease_s is not None and job.lease_s < connection.now_s
    ]
    tables.audit_leases(expired)
    over = [job for job in expired if job.cancel_s is not None or _is_past(connection, job.deadline_s)]
    moved |= _requeue_or_fail(connection, [job for job in expired if job not in over])
    return {**moved, **end_running(connection, _stopped(connection, over, decode))}


def fix_now(connection: Connection) -> None:
    """See shardline.store.sweeps."""


# shardline.store.crashes ---------------------------------------------------------------------------------------------


def quarantined(connection: Connection, ids: Collection[str]) -> list[UUID]:
    """See shardline.store.crashes."""
    jobs = [job for job_id in ids if (job := connection.tables.jobs.get(UUID(job_id)))]
    waiting = [job for job in jobs if job.state is JobState.QUEUED and job.crashes > 0]
    return [job.id for job in sorted(waiting, key=lambda job: job.order)]


def requeue_or_fail_held(connection: Connection, keys: Collection[Key]) -> dict[UUID, str]:
    """See shardline.store.crashes."""
    jobs = [(connection.tables.jobs.get(job_id), fence) for job_id, fence in keys]
    return _requeue_or_fail(connection, [job for job, fence in jobs if job and _holds(job, fence, JobState.RUNNING)])


def _requeue_or_fail(connection: Connection, jobs: Sequence[Job]) -> dict[UUID, str]:
    moved: dict[UUID, str] = {}
    ends: list[End] = []
    for job in jobs:
        key, attempt = (job.id, job.fence), connection.tables.attempts[job.id, job.fence]
        if attempt.parked:
            moved |= dict.fromkeys(requeue_running(connection, [key], outcome="released"), "released")
        elif len(attempt.tokens) > attempt.num_resumed:
            moved |= dict.fromkeys(requeue_running(connection, [key], outcome="lost"), "lost")
        elif job.crashes + 1 < job.max_crashes:
            moved |= dict.fromkeys(requeue_running(connection, [key], outcome="crashed"), "crashed")
        else:
            ends.append(End(job_id=job.id, fence=job.fence, state=JobState.FAILED, error={"code": "crashed"}))
    return {**moved, **end_running(connection, ends)}


# shardline.store.jobs ------------------------------------------------------------------------------------------------


def request_cancel(connection: Connection, ids: Iterable[UUID]) -> None:
    """See shardline.store.jobs."""
    for job_id in ids:
        job = connection.tables.jobs[job_id]
        if job.state.terminal:
            continue
        job.cancel_s = connection.now_s if job.cancel_s is None else job.cancel_s
        if job.state is JobState.QUEUED and job.fence == 0:
            job.state = JobState.CANCELLED


# Conditions ----------------------------------------------------------------------------------------------------------


def _holds(job: Job, fence: int, state: JobState) -> bool:
    return job.fence == fence and job.state is state


def _is_past(connection: Connection, deadline_s: float | None) -> bool:
    return deadline_s is not None and deadline_s <= connection.now_s


def _is_claimable(connection: Connection, job: Job, row: PipelineRow, exactness: str, exact_wait_s: float) -> bool:
    waits_since_s = job.requeued_s if job.requeued_s is not None else job.created_s
    return (
        job.state is JobState.QUEUED
        and job.cancel_s is None
        and job.not_before_s <= connection.now_s
        and not _is_past(connection, job.deadline_s)
        and job.model == row.model
        and (job.exactness in (None, exactness) or not job.exact or waits_since_s <= connection.now_s - exact_wait_s)
        and not _is_too_long(connection.tables, job, row)
    )


def _is_too_long(tables: Tables, job: Job, row: PipelineRow) -> bool:
    attempt = tables.attempts.get((job.id, job.fence))
    num_tokens = len(job.prompt_ids) + (len(attempt.tokens) if attempt else 0)
    return row.kv_tokens is not None and num_tokens > row.kv_tokens


def _within_window(tables: Tables, queued: Sequence[Job], now_s: float) -> list[Job]:
    seats: dict[str, int] = {}
    for row in tables.pipelines.values():
        if row.lease_s > now_s:
            seats[row.model] = seats.get(row.model, 0) + row.seats
    room: dict[tuple[str, int], int] = {}
    due = []
    for job in queued:
        line = (job.model, job.priority)
        if line not in room:
            num_out = sum((one.model, one.priority) == line and one.sent_s is not None for one in queued)
            room[line] = max(WINDOW_MIN, WINDOW_PER_SEAT * seats.get(job.model, 0)) - num_out
        if job.sent_s is None and job.not_before_s <= now_s and job.cancel_s is None and room[line] > 0:
            room[line] -= 1
            due.append(job)
    return due


def _stopped(connection: Connection, jobs: Iterable[Job], decode: Decode) -> list[End]:
    ends = []
    for job in jobs:
        attempt = connection.tables.attempts.get((job.id, job.fence))
        tokens = attempt.tokens if attempt else ()
        is_cancelled = job.cancel_s is not None
        state, reason = (
            (JobState.CANCELLED, FinishReason.CANCELLED) if is_cancelled else (JobState.EXPIRED, FinishReason.EXPIRED)
        )
        result = None
        if tokens:
            usage = Usage(prompt_tokens=len(job.prompt_ids), completion_tokens=len(tokens))
            text = decode(_partial(job, tokens))
            if text is None:
                continue
            result = Result(job_id=job.id, text=text, token_ids=tokens, usage=usage, finish_reason=reason, exact=True)
        ends.append(End(job_id=job.id, fence=job.fence, state=state, result=result))
    return ends


def _partial(job: Job, tokens: tuple[int, ...]) -> Partial:
    return Partial(
        job_id=job.id,
        fence=job.fence,
        model=job.model,
        params=job.params,
        max_tokens=job.max_tokens,
        num_prompt=len(job.prompt_ids),
        ids=tokens,
        logprobs=None,
    )


def _claimed(connection: Connection, job: Job, tokens: tuple[int, ...]) -> Claimed:
    return Claimed(
        job_id=job.id,
        fence=job.fence,
        tenant_id="default",
        prompt_ids=job.prompt_ids,
        output_ids=tokens,
        logprobs=None,
        params=job.params,
        max_tokens=job.max_tokens,
        seed=job.seed,
        priority=job.priority,
        crashes=job.crashes,
        exact=job.exact,
        queued_s=connection.now_s - job.created_s,
    )
