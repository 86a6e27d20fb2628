"""What heads do with jobs: claim, park, begin, heartbeat, end, release. Every write carries the fence of its claim."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, text

from shardline.job import JobState, Result, SamplingParams, TokenLogprob
from shardline.store.bells import ring
from shardline.store.encoding import dump, dump_logprobs, dump_result, load_logprobs, load_params
from shardline.store.readable import sort_rows
from shardline.tables import DONE_CHANNEL, JOBS_CHANNEL

LATER_WAIT_S = 15.0
"""Until a job of a later release is sent again."""

Key = tuple[UUID, int]
"""A job and the fence of one claim of it."""

# The KV that the next token of a job needs, in tokens. A pipeline of an older release has not said how much it has.
KNOWN_TOKENS = """cardinality(jobs.prompt_ids) + coalesce((SELECT cardinality(attempts.tokens) FROM attempts
    WHERE attempts.job_id = jobs.id AND attempts.fence = jobs.fence), 0)"""

# Locked by a statement of its own: the next one must see what the last holder committed while we waited.
LOCK_CLAIMABLE = text(f"""
SELECT jobs.id, jobs.fence, jobs.params FROM jobs JOIN pipelines ON pipelines.id = :pipeline
WHERE jobs.id = ANY(CAST(:ids AS uuid[])) AND jobs.state = 'queued' AND jobs.prepared_at IS NOT NULL
    AND jobs.cancel_requested_at IS NULL AND jobs.not_before <= now()
    AND (jobs.deadline_at IS NULL OR jobs.deadline_at > now())
    AND jobs.model = pipelines.model AND pipelines.epoch = :epoch
    AND (jobs.exactness IS NULL OR jobs.exactness = :exactness OR NOT jobs.exact
        OR coalesce(jobs.requeued_at, jobs.created_at) <= now() - make_interval(secs => :exact_wait_s))
    AND (pipelines.kv_tokens IS NULL OR {KNOWN_TOKENS} <= pipelines.kv_tokens)
    AND (jobs.crashes = 0 OR :suspects)
ORDER BY jobs.id FOR UPDATE OF jobs
""")  # noqa: S608 (constants of ours)

LOCK_TOO_LONG = text(f"""
SELECT jobs.id FROM jobs JOIN pipelines ON pipelines.id = :pipeline
WHERE jobs.id = ANY(CAST(:ids AS uuid[])) AND jobs.state = 'queued' AND jobs.model = pipelines.model
    AND jobs.prepared_at IS NOT NULL AND {KNOWN_TOKENS} > pipelines.kv_tokens
ORDER BY jobs.id FOR UPDATE OF jobs
""")  # noqa: S608 (constants of ours)

# Out of the window of what is sent ahead, so that rows which no head here can run do not fill it.
DEFER = text("""
UPDATE jobs SET sent_at = NULL, num_sends = 0, not_before = now() + make_interval(secs => :wait_s)
WHERE id = ANY(CAST(:ids AS uuid[])) AND state = 'queued'
""")

CLAIM = text("""
WITH claimed AS (
    UPDATE jobs SET state = 'running', fence = fence + 1, lease_until = now() + make_interval(secs => :lease_s),
        worker = :worker, pipeline = :pipeline,
        exact = jobs.exact AND coalesce(exactness = :exactness, true)
            AND (SELECT pipelines.exact FROM pipelines WHERE pipelines.id = :pipeline),
        exactness = coalesce(exactness, :exactness)
    WHERE id = ANY(CAST(:ids AS uuid[])) AND state = 'queued'
    RETURNING *
), attempt AS (
    INSERT INTO attempts (
        job_id, fence, pipeline, epoch, worker, fingerprint, exactness, num_resumed, tokens, logprobs)
    SELECT claimed.id, claimed.fence, :pipeline, :epoch, :worker, :fingerprint, :exactness,
        coalesce(cardinality(before.tokens), 0), coalesce(before.tokens, '{}'), before.logprobs
    FROM claimed LEFT JOIN attempts AS before ON before.job_id = claimed.id AND before.fence = claimed.fence - 1
    RETURNING job_id, tokens, logprobs
)
SELECT claimed.id, claimed.fence, prompt_ids, params, max_tokens, seed, priority, crashes, exact, created_at,
    deadline_at, traceparent, tokens, logprobs,
    extract(epoch FROM now() - greatest(created_at, not_before, requeued_at))::float8 AS queued_s
FROM claimed JOIN attempt ON attempt.job_id = claimed.id ORDER BY priority, created_at, claimed.id
""")

PARK = text("""
UPDATE attempts SET parked = true
FROM jsonb_to_recordset(CAST(:keys AS jsonb)) AS keys(job_id uuid, fence bigint)
WHERE attempts.job_id = keys.job_id AND attempts.fence = keys.fence
""")

BEGIN = text("""
WITH keys AS (
    SELECT * FROM jsonb_to_recordset(CAST(:keys AS jsonb)) AS keys(job_id uuid, fence bigint)
),
-- Those that it still holds, in the order in which everybody locks jobs.
locked AS (
    SELECT jobs.id, jobs.fence FROM jobs JOIN keys ON keys.job_id = jobs.id AND keys.fence = jobs.fence
    WHERE jobs.state = 'running' ORDER BY jobs.id FOR UPDATE OF jobs
)
UPDATE attempts SET parked = false
FROM locked WHERE attempts.job_id = locked.id AND attempts.fence = locked.fence
RETURNING attempts.job_id
""")

HEARTBEAT = text("""
WITH beats AS (
    SELECT * FROM jsonb_to_recordset(CAST(:beats AS jsonb))
        AS beats(job_id uuid, fence bigint, start int, ids int[], logprobs jsonb)
), locked AS (
    SELECT jobs.id FROM jobs JOIN beats ON beats.job_id = jobs.id AND beats.fence = jobs.fence
    WHERE jobs.state = 'running' ORDER BY jobs.id FOR UPDATE OF jobs
), renewed AS (
    UPDATE jobs SET lease_until = now() + make_interval(secs => :lease_s)
    FROM locked, beats, attempts
    WHERE jobs.id = locked.id AND beats.job_id = jobs.id AND beats.fence = jobs.fence AND jobs.state = 'running'
        AND attempts.job_id = jobs.id AND attempts.fence = jobs.fence
        -- A gap between the checkpoint and these tokens would lose some: such a claim is not renewed.
        AND cardinality(attempts.tokens) >= beats.start
    RETURNING jobs.id, jobs.fence, jobs.cancel_requested_at, jobs.deadline_at
), saved AS (
    UPDATE attempts SET heartbeat_at = now(),
        tokens = CASE WHEN cardinality(beats.ids) = 0 THEN tokens ELSE tokens[1:beats.start] || beats.ids END,
        logprobs = CASE
            WHEN beats.logprobs IS NULL THEN attempts.logprobs
            WHEN beats.start = 0 THEN beats.logprobs
            ELSE jsonb_path_query_array(attempts.logprobs, '$[0 to $last]', jsonb_build_object('last', beats.start - 1))
                || beats.logprobs END
    FROM renewed JOIN beats ON beats.job_id = renewed.id AND beats.fence = renewed.fence
    WHERE attempts.job_id = renewed.id AND attempts.fence = renewed.fence
)
SELECT id, fence, cancel_requested_at IS NOT NULL AS cancel_requested, coalesce(deadline_at <= now(), false) AS expired
FROM renewed
""")

END = text("""
WITH ends AS (
    SELECT * FROM jsonb_to_recordset(CAST(:ends AS jsonb)) AS ends(
        job_id uuid, fence bigint, state text, error jsonb, text text, token_ids int[], prompt_tokens int,
        completion_tokens int, finish_reason text, logprobs jsonb, exact bool, timings jsonb, provenance jsonb)
), locked AS (
    SELECT jobs.id FROM jobs JOIN ends ON ends.job_id = jobs.id AND ends.fence = jobs.fence
    WHERE jobs.state = :held ORDER BY jobs.id FOR UPDATE OF jobs
), ended AS (
    UPDATE jobs SET state = ends.state, error = ends.error, finished_at = now(), lease_until = NULL
    FROM locked, ends
    WHERE jobs.id = locked.id AND ends.job_id = jobs.id AND ends.fence = jobs.fence AND jobs.state = :held
    RETURNING jobs.id, jobs.fence, jobs.state, jobs.exact
), attempt AS (
    UPDATE attempts SET ended_at = coalesce(ended_at, now()), outcome = coalesce(outcome, ended.state),
        tokens = coalesce(ends.token_ids, tokens),
        logprobs = CASE WHEN ends.token_ids IS NULL THEN attempts.logprobs ELSE ends.logprobs END
    FROM ended JOIN ends ON ends.job_id = ended.id
    WHERE attempts.job_id = ended.id AND attempts.fence = ended.fence
), result AS (
    INSERT INTO results (
        job_id, fence, text, token_ids, prompt_tokens, completion_tokens, finish_reason, logprobs, exact, timings,
        provenance)
    SELECT ended.id, ended.fence, ends.text, ends.token_ids, ends.prompt_tokens, ends.completion_tokens,
        ends.finish_reason, ends.logprobs, ends.exact AND ended.exact, ends.timings, ends.provenance
    FROM ended JOIN ends ON ends.job_id = ended.id WHERE ends.finish_reason IS NOT NULL
)
SELECT id, state FROM ended
""")

ENDED_UNDER = text("""
SELECT jobs.id, jobs.state
FROM jobs JOIN jsonb_to_recordset(CAST(:keys AS jsonb)) AS keys(job_id uuid, fence bigint)
    ON keys.job_id = jobs.id AND keys.fence = jobs.fence
WHERE jobs.state NOT IN ('queued', 'running')
""")

REQUEUE = text("""
WITH keys AS (
    SELECT * FROM jsonb_to_recordset(CAST(:keys AS jsonb)) AS keys(job_id uuid, fence bigint)
), locked AS (
    SELECT jobs.id FROM jobs JOIN keys ON keys.job_id = jobs.id AND keys.fence = jobs.fence
    WHERE jobs.state = 'running' ORDER BY jobs.id FOR UPDATE OF jobs
), requeued AS (
    UPDATE jobs SET state = 'queued', lease_until = NULL, worker = NULL, pipeline = NULL,
        requeued_at = now(), sent_at = NULL, num_sends = 0,
        crashes = CASE CAST(:outcome AS text) WHEN 'crashed' THEN crashes + 1 WHEN 'lost' THEN 0 ELSE crashes END
    FROM locked, keys
    WHERE jobs.id = locked.id AND keys.job_id = jobs.id AND keys.fence = jobs.fence AND jobs.state = 'running'
    RETURNING jobs.id, jobs.fence
), attempt AS (
    UPDATE attempts SET ended_at = now(), outcome = :outcome
    FROM requeued WHERE attempts.job_id = requeued.id AND attempts.fence = requeued.fence
)
SELECT id FROM requeued
""")

EXPIRE = text("""
WITH held AS (
    SELECT id FROM jobs WHERE state = 'running' AND worker = :worker AND pipeline = :pipeline AND lease_until > now()
    ORDER BY id FOR UPDATE SKIP LOCKED
)
UPDATE jobs SET lease_until = now() FROM held WHERE jobs.id = held.id
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """A job that is ours until its lease ends, with all that earlier attempts saved."""

    job_id: UUID
    fence: int
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    params: SamplingParams
    max_tokens: int
    seed: int
    priority: int
    crashes: int
    exact: bool
    """False once a head that is not exact, or heads of different exactness, had it."""
    created_at: Any
    deadline_at: Any
    queued_s: float
    """Since it was accepted, due or requeued, whichever was last."""
    traceparent: str | None
    parked: bool = False
    """It waits here for KV: nothing of it is computed before `begin`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A sign of life of one job, with the output tokens from place `start` on that are not saved yet."""

    job_id: UUID
    fence: int
    start: int
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BeatReply:
    """The claim holds; what its holder must do next."""

    cancel_requested: bool
    expired: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """A terminal state with its result (also partial: cancelled, expired) or its error."""

    job_id: UUID
    fence: int
    state: JobState
    result: Result | None = None
    error: Mapping[str, Any] | None = None


def claim(
    connection: Connection,
    ids: Collection[UUID | str],
    *,
    worker: str,
    pipeline: str,
    epoch: int,
    fingerprint: str,
    exactness: str,
    lease_s: float,
    exact_wait_s: float,
    suspects: bool = True,
) -> list[Claimed]:
    """Take those that may run now, for a pipeline in its present epoch and of its model. The others: drop their
    messages. A started job of another exactness is left alone for `exact_wait_s`, then taken with `exact` false; one
    that is longer than the pipeline's KV is never taken; without `suspects` none that an engine died under, whoever
    looked before. A row that this release does not understand is left for a later head, or ends `failed` if none
    would: see `readable`."""
    head = {"pipeline": pipeline, "epoch": epoch, "exactness": exactness}
    wanted = {"ids": [str(job_id) for job_id in ids], "exact_wait_s": exact_wait_s, "suspects": suspects}
    locked = connection.execute(LOCK_CLAIMABLE, {**head, **wanted}).all()
    readable = _readable(connection, locked)
    if not readable:
        return []
    values = {**head, "ids": readable, "worker": worker, "fingerprint": fingerprint, "lease_s": lease_s}
    return [_claimed(row) for row in connection.execute(CLAIM, values)]


def postpone(connection: Connection, ids: Collection[UUID | str], *, pipeline: str, wait_s: float) -> set[UUID]:
    """Those that are too long for the KV of this pipeline: sent again after a while, when a larger one may take them.
    Returns them."""
    wanted = {"ids": [str(job_id) for job_id in ids], "pipeline": pipeline}
    too_long = list(connection.scalars(LOCK_TOO_LONG, wanted))
    if too_long:
        connection.execute(DEFER, {"ids": too_long, "wait_s": wait_s})
    return set(too_long)


def park(connection: Connection, keys: Collection[Key]) -> None:
    """In the transaction of their claim: these wait in their head. One that dies meanwhile is no crash of theirs."""
    connection.execute(PARK, {"keys": _dump_keys(keys)})


def begin(connection: Connection, keys: Collection[Key]) -> set[UUID]:
    """Committed before the first of their tokens is computed: parked jobs that run from now on. A job that is missing
    is not ours any more."""
    return set(connection.scalars(BEGIN, {"keys": _dump_keys(keys)}))


def heartbeat(connection: Connection, beats: Sequence[Beat], *, lease_s: float) -> dict[Key, BeatReply]:
    """Renew leases and save tokens, all in one statement. A key that is missing lost its fence: drop the job."""
    rows = [
        {
            "job_id": beat.job_id,
            "fence": beat.fence,
            "start": beat.start,
            "ids": beat.ids,
            "logprobs": dump_logprobs(beat.logprobs) or None,
        }
        for beat in beats
    ]
    replies = connection.execute(HEARTBEAT, {"beats": dump(rows), "lease_s": lease_s})
    return {
        (row.id, row.fence): BeatReply(cancel_requested=row.cancel_requested, expired=row.expired) for row in replies
    }


def end(connection: Connection, ends: Sequence[End]) -> dict[UUID, JobState]:
    """End running jobs under their fences. Returns those that are ended under them now, with the state that counts:
    also those that this same call ended before an answer was lost. The others are not ours any more: drop them."""
    return end_from(connection, ends, held=JobState.RUNNING)


def end_from(connection: Connection, ends: Sequence[End], *, held: JobState) -> dict[UUID, JobState]:
    """`end` of jobs in the state `held`: heads end running ones, relays also queued ones."""
    if not ends:
        return {}
    rows = [_end_row(one) for one in ends]
    ended = {row.id: JobState(row.state) for row in connection.execute(END, {"ends": dump(rows), "held": held})}
    if ended:
        ring(connection, DONE_CHANNEL)
    others = [(one.job_id, one.fence) for one in ends if one.job_id not in ended]
    if others:
        before = connection.execute(ENDED_UNDER, {"keys": _dump_keys(others)})
        ended |= {row.id: JobState(row.state) for row in before}
    return ended


def release(connection: Connection, keys: Collection[Key]) -> set[UUID]:
    """Give jobs back: `queued`, no crash counted, sent again at once."""
    return requeue(connection, keys, outcome="released")


def expire(connection: Connection, *, worker: str, pipeline: str) -> int:
    """A head has started anew: what its dead predecessor held need not wait for the end of its leases. Returns how
    many; relays move them as ever, and the fence keeps out a predecessor that is alive after all."""
    return connection.execute(EXPIRE, {"worker": worker, "pipeline": pipeline}).rowcount


def requeue(connection: Connection, keys: Collection[Key], *, outcome: str) -> set[UUID]:
    """`running` → `queued` under the fence. The outcome of the attempt is `released`, `crashed` (one crash more) or
    `lost`, which forgets crashes: the attempt got further, so no engine breaks where the last ones did."""
    if not keys:
        return set()
    requeued = set(connection.scalars(REQUEUE, {"keys": _dump_keys(keys), "outcome": outcome}))
    if requeued:
        ring(connection, JOBS_CHANNEL)
    return requeued


def _dump_keys(keys: Iterable[Key]) -> str:
    return dump([{"job_id": job_id, "fence": fence} for job_id, fence in keys])


def _readable(connection: Connection, rows: Sequence[Row[Any]]) -> list[UUID]:
    """Those that this release understands; the others are put off, or ended."""
    found = sort_rows(rows)
    if found.later:
        connection.execute(DEFER, {"ids": found.later, "wait_s": LATER_WAIT_S})
    fences = {row.id: row.fence for row in rows}
    ends = [
        End(job_id=job_id, fence=fences[job_id], state=JobState.FAILED, error=error)
        for job_id, error in found.wrong.items()
    ]
    end_from(connection, ends, held=JobState.QUEUED)
    return found.readable


def _claimed(row: Row[Any]) -> Claimed:
    return Claimed(
        job_id=row.id,
        fence=row.fence,
        prompt_ids=tuple(row.prompt_ids),
        output_ids=tuple(row.tokens),
        logprobs=load_logprobs(row.logprobs),
        params=load_params(row.params),
        max_tokens=row.max_tokens,
        seed=row.seed,
        priority=row.priority,
        crashes=row.crashes,
        exact=row.exact,
        created_at=row.created_at,
        deadline_at=row.deadline_at,
        queued_s=row.queued_s,
        traceparent=row.traceparent,
    )


def _end_row(one: End) -> dict[str, Any]:
    assert one.state.terminal, one.state
    row: dict[str, Any] = {"job_id": one.job_id, "fence": one.fence, "state": one.state, "error": one.error}
    return row if one.result is None else row | dump_result(one.result)
