"""Twins of the statements with which jobs are claimed, renewed and ended: what the SQL does, done
to tables in memory.

The store's own functions make the parameters and read the rows. `tests/conformance/test_rows.py`
runs the same random operations here and on a real Postgres. A transaction is one moment here: that
rows are locked, and in which order, is the store's own tests' business.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy.sql import Executable

from shardline.contract.job import DEFAULT_TENANT, JobState
from shardline_server.store import claims, crashes, ends, leases
from shardline_server.store.claims import Claimant
from tests.simulation.rows import Attempt, EndRow, Job, PipelineRow, Rows, Tables, Twin


class KeyRow(msgspec.Struct):
    """A claim, as statements get it in `keys`."""

    job_id: UUID
    fence: int
    wait_s: float | None = None


class BeatRow(msgspec.Struct):
    """What HEARTBEAT gets of one job."""

    job_id: UUID
    fence: int
    start: int
    ids: tuple[int, ...]


# shardline_server.store.claims
# ----------------------------------------------------------------------------------------------


def find_claimable(
    tables: Tables,
    *,
    ids: Collection[str],
    pipeline: str,
    epoch: int,
    exact_wait_s: float,
    with_quarantined: bool,
    **of_head: str,
) -> Rows:
    """Those that may run on this pipeline now."""
    row = tables.pipelines.get(pipeline)
    if row is None or row.epoch != epoch:
        return []
    return [
        {"id": job.id, "fence": job.fence, "params": job.params, "is_limited": False}
        for job in tables.select(ids)
        if _is_claimable(tables, job, row, _exactness(job, **of_head), exact_wait_s)
        and (job.crashes == 0 or with_quarantined)
    ]


def lock_claimable(tables: Tables, *, ids: Collection[str], **wanted: Any) -> Rows:
    """Those of them that nobody else has locked."""
    free = [str(job.id) for job in tables.lock(ids)]
    return find_claimable(tables, ids=free, **wanted)


def lock_unfit(
    tables: Tables, *, ids: Collection[str], pipeline: str, exactness: str, adapters: str
) -> Rows:
    """Those that no pipeline of this KV can hold, or of this exactness may run."""
    row = tables.pipelines.get(pipeline)
    if row is None:
        return []
    queued = [
        job for job in tables.lock(ids) if job.state is JobState.QUEUED and job.model == row.model
    ]
    return [
        {"id": job.id}
        for job in queued
        if _is_too_long(tables, job, row)
        or _lacks_exact_rows(job, row, _exactness(job, exactness, adapters))
    ]


def defer(tables: Tables, *, ids: Collection[UUID], wait_s: float) -> int:
    """Out of the window, for a while."""
    queued = [job for job in tables.select(ids) if job.state is JobState.QUEUED]
    for job in queued:
        job.not_before_s = tables.now_s + wait_s
        job.sent_s = None
        job.num_sends = 0
    return len(queued)


def claim(
    tables: Tables, *, ids: Collection[UUID], lease_s: float, adapters: str, **claimant: Any
) -> Rows:
    """The next fence of each, with an attempt that goes on from what the one before it saved."""
    head = Claimant(**claimant)
    is_exact = tables.pipelines[head.pipeline].exact
    claimed = []
    for job in sorted(tables.select(ids), key=lambda job: job.order):
        if job.state is not JobState.QUEUED:
            continue
        before = tables.attempts.get((job.id, job.fence))
        exactness = _exactness(job, head.exactness, adapters)
        tokens = before.tokens if before else ()
        job.state = JobState.RUNNING
        job.fence = job.fence + 1
        job.worker = head.worker
        job.pipeline = head.pipeline
        job.exact = job.exact and job.exactness in (None, exactness) and is_exact
        job.exactness = job.exactness or exactness
        tables.grant(job, tables.now_s + lease_s)
        tables.attempts[job.id, job.fence] = Attempt(
            pipeline=head.pipeline,
            epoch=head.epoch,
            worker=head.worker,
            tokens=tokens,
            num_resumed=len(tokens),
        )
        claimed.append(_claimed(tables, job, tokens))
    return claimed


def park(tables: Tables, *, keys: str) -> int:
    """They wait in their head."""
    attempts = [tables.attempts.get((key.job_id, key.fence)) for key in _keys(keys)]
    running = [one for one in attempts if one is not None and one.outcome is None]
    for attempt in running:
        attempt.parked = True
    return len(running)


def begin(tables: Tables, *, keys: str) -> Rows:
    """They run from now on."""
    held = _held(tables, keys)
    for job in held:
        tables.attempts[job.id, job.fence].parked = False
    return [{"job_id": job.id} for job in held]


# shardline_server.store.leases
# ----------------------------------------------------------------------------------------------


def heartbeat(tables: Tables, *, beats: str, lease_s: float) -> Rows:
    """Leases renewed, tokens saved at their index."""
    replies = []
    for beat in msgspec.json.decode(beats, type=list[BeatRow]):
        job = tables.jobs.get(beat.job_id)
        if job is None or not job.holds(beat.fence, JobState.RUNNING):
            continue
        key = {"id": job.id, "fence": job.fence}
        if job.id in tables.locked:
            held_up = {"renewed": False, "cancel_requested": False, "expired": False}
            replies.append(key | held_up)
            continue
        saved = tables.attempts[job.id, job.fence].tokens
        if len(saved) < beat.start:
            continue
        tables.audit(job, beat.fence, "heartbeat")
        tables.grant(job, tables.now_s + lease_s)
        if beat.ids:
            tables.save((job.id, job.fence), saved[: beat.start] + beat.ids)
        asked = {
            "cancel_requested": job.cancel_s is not None,
            "expired": tables.is_past(job.deadline_s),
        }
        replies.append(key | {"renewed": True} | asked)
    return replies


def expire(tables: Tables, *, worker: str, pipeline: str) -> int:
    """Leases that run under this worker's name end now."""
    mine = [job for job in tables.jobs.values() if (job.worker, job.pipeline) == (worker, pipeline)]
    held = [
        job
        for job in mine
        if job.state is JobState.RUNNING
        and (job.lease_s or 0.0) > tables.now_s
        and job.id not in tables.locked
    ]
    for job in held:
        tables.cut_short(job)
    return len(held)


# shardline_server.store.ends
# ------------------------------------------------------------------------------------------------


def end(tables: Tables, *, ends: str, left: JobState) -> Rows:
    """Those that are in the state that they are to leave."""
    ended = []
    for one in msgspec.json.decode(ends, type=list[EndRow]):
        (job,) = tables.lock([one.job_id]) or (None,)
        if job is not None and job.holds(one.fence, left):
            tables.end(job, one)
            ended.append({"id": job.id, "state": job.state})
    return ended


def states_under(tables: Tables, *, keys: str) -> Rows:
    """Those that ended before, under the same fence, or are locked."""
    fences = {key.job_id: key.fence for key in _keys(keys)}
    same = [job for job in tables.select(fences) if job.fence == fences[job.id]]
    return [{"id": job.id, "state": job.state} for job in same if job.state is not JobState.QUEUED]


def requeue(tables: Tables, *, keys: str, outcome: str) -> Rows:
    """Claims are given up."""
    requeued = []
    for key in _keys(keys):
        (job,) = tables.lock([key.job_id]) or (None,)
        if job is None or not job.holds(key.fence, JobState.RUNNING):
            continue
        tables.audit(job, key.fence, outcome)
        tables.attempts[job.id, job.fence].outcome = outcome
        job.state = JobState.QUEUED
        job.crashes = {"crashed": job.crashes + 1, "lost": 0}.get(outcome, job.crashes)
        job.lease_s = job.worker = job.pipeline = job.sent_s = None
        job.requeued_s = tables.now_s
        if key.wait_s is not None:
            job.not_before_s = tables.now_s + key.wait_s * (0.5 + 0.5 * _jitter(job))
        job.num_sends = 0
        requeued.append({"id": job.id})
    return requeued


# shardline_server.store.crashes
# ---------------------------------------------------------------------------------------------


def quarantined(tables: Tables, *, ids: Collection[str]) -> Rows:
    """Those that an engine died under, in their order."""
    waiting = [
        job for job in tables.select(ids) if job.state is JobState.QUEUED and job.crashes > 0
    ]
    return [{"id": job.id} for job in sorted(waiting, key=lambda job: job.order)]


def lock_held(tables: Tables, *, keys: str) -> Rows:
    """Those of these claims that still hold."""
    return [{"id": job.id} for job in _held(tables, keys)]


def last_attempts(tables: Tables, *, ids: Collection[UUID]) -> Rows:
    """What the last attempt of each saved."""
    rows = []
    for job in tables.select(ids):
        attempt = tables.attempts.get((job.id, job.fence))
        rows.append(
            {
                "id": job.id,
                "fence": job.fence,
                "crashes": job.crashes,
                "max_crashes": job.max_crashes,
                "retry": job.retry,
                "num_failures": _num_failures(tables, job),
                "is_cancelled": job.cancel_s is not None,
                "is_expired": tables.is_past(job.deadline_s),
                "has_tokens": attempt is not None and len(attempt.tokens) > 0,
                "has_progress": attempt is not None and len(attempt.tokens) > attempt.num_resumed,
                "parked": attempt is not None and attempt.parked,
            }
        )
    return rows


def history(tables: Tables, *, job_id: UUID) -> Rows:
    """The newest attempts of a job, for its dead letter. Their times are not kept here."""
    fences = sorted((fence for of, fence in tables.attempts if of == job_id), reverse=True)
    newest = [(fence, tables.attempts[job_id, fence]) for fence in fences[: crashes.MAX_HISTORY]]
    return [
        {"fence": fence, "pipeline": one.pipeline, "worker": one.worker, "outcome": one.outcome}
        for fence, one in newest
    ]


TWINS: Mapping[Executable, Twin] = {
    claims.LOCK_CLAIMABLE: lock_claimable,
    claims.FIND_CLAIMABLE: find_claimable,
    claims.LOCK_UNFIT: lock_unfit,
    claims.DEFER: defer,
    claims.CLAIM: claim,
    claims.PARK: park,
    claims.BEGIN: begin,
    leases.HEARTBEAT: heartbeat,
    leases.EXPIRE: expire,
    ends.END: end,
    ends.STATES_UNDER: states_under,
    ends.REQUEUE: requeue,
    crashes.QUARANTINED: quarantined,
    crashes.LOCK_HELD: lock_held,
    crashes.LAST_ATTEMPTS: last_attempts,
    crashes.HISTORY: history,
}

# Conditions
# --------------------------------------------------------------------------------------------------


def _keys(keys: str) -> list[KeyRow]:
    return msgspec.json.decode(keys, type=list[KeyRow])


def _jitter(job: Job) -> float:
    """What JITTER is of its attempt."""
    digest = hashlib.md5(f"{job.id}/{job.fence}".encode(), usedforsecurity=False).hexdigest()
    return int(digest[:8], 16) / 2**32


def _num_failures(tables: Tables, job: Job) -> int | None:
    if job.retry is None:
        return None
    earlier = [one for (job_id, _), one in tables.attempts.items() if job_id == job.id]
    return sum(one.outcome in ("crashed", "failed") for one in earlier)


def _held(tables: Tables, keys: str) -> list[Job]:
    fences = {key.job_id: key.fence for key in _keys(keys)}
    return [job for job in tables.lock(fences) if job.holds(fences[job.id], JobState.RUNNING)]


def _exactness(job: Job, exactness: str, adapters: str) -> str:
    if (adapter := job.params.get("adapter")) is None:
        return exactness
    return (
        f"{exactness}+{msgspec.json.decode(adapters, type=dict[str, str]).get(adapter, job.fence)}"
    )


def _is_claimable(
    tables: Tables, job: Job, row: PipelineRow, exactness: str, exact_wait_s: float
) -> bool:
    waits_since_s = job.requeued_s if job.requeued_s is not None else job.created_s
    return (
        job.state is JobState.QUEUED
        and job.cancel_s is None
        and job.not_before_s <= tables.now_s
        and not tables.is_past(job.deadline_s)
        and job.model == row.model
        and (
            job.exactness in (None, exactness)
            or not job.exact
            or waits_since_s <= tables.now_s - exact_wait_s
        )
        and not _lacks_exact_rows(job, row, exactness)
        and row.kv_tokens is not None
        and not _is_too_long(tables, job, row)
    )


def _lacks_exact_rows(job: Job, row: PipelineRow, exactness: str) -> bool:
    has_them = row.exact and job.exactness in (None, exactness)
    return bool(job.params.get("exact")) and not has_them


def _is_too_long(tables: Tables, job: Job, row: PipelineRow) -> bool:
    attempt = tables.attempts.get((job.id, job.fence))
    num_tokens = len(job.prompt_ids) + (len(attempt.tokens) if attempt else 0)
    return row.kv_tokens is not None and num_tokens > row.kv_tokens


def _claimed(tables: Tables, job: Job, tokens: tuple[int, ...]) -> dict[str, Any]:
    return {
        "id": job.id,
        "fence": job.fence,
        "tenant_id": DEFAULT_TENANT,
        "prompt_ids": job.prompt_ids,
        "params": job.params,
        "max_tokens": job.max_tokens,
        "seed": job.seed,
        "priority": job.priority,
        "crashes": job.crashes,
        "retry": job.retry,
        "exact": job.exact,
        "tokens": tokens,
        "logprobs": None,
        "traceparent": None,
        "is_chat": False,
        "queued_s": tables.now_s - job.created_s,
        "due_s": tables.now_s - max(job.created_s, job.not_before_s),
        "age_s": tables.now_s - job.created_s,
    }
