"""How a head gets jobs: it claims rows, parks those it has no KV for, and begins them later. Knows
no heartbeat.

Each claim raises its row's fence by one, and every later write carries that fence: see `leases` and
`ends`.
Locks: rows of `jobs` with SKIP LOCKED, before any of their attempts is written; then those of
`running_limits`. `park` writes attempts alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, text

from shardline.contract.job import JobState, SamplingParams, TokenLogprob
from shardline.contract.retry_policy import RetryPolicy
from shardline.store.connection.encoding import (
    Key,
    dump,
    dump_keys,
    load_logprobs,
    load_params,
    readable_retry,
)
from shardline.store.schedules.pauses import PAUSED_BY
from shardline_server.store.ends import End, end_queued
from shardline_server.store.forward_compatibility import sort_rows
from shardline_server.store.running_limits import IS_LIMITED, over_limit

LIMIT_WAIT_S = 1.0
"""Until a job is sent again that its tenant's limit of running jobs kept back."""
LATER_WAIT_S = 15.0
"""Until a job of a later release is sent again."""

# The KV that the next token of a job needs, in tokens.
KNOWN_TOKENS = """cardinality(jobs.prompt_ids) + coalesce((
        SELECT cardinality(attempts.tokens) FROM attempts
        WHERE attempts.job_id = jobs.id AND attempts.fence = jobs.fence
    ), 0)"""

# What decides a job's tokens on this head: with an adapter its fingerprint too. One that the head
# has not read yet counts as another one each time.
EXACTNESS = """CAST(:exactness AS text)
    || CASE WHEN jobs.params ->> 'adapter' IS NULL THEN '' ELSE '+' || coalesce(
        CAST(:adapters AS jsonb) ->> (jobs.params ->> 'adapter'), CAST(jobs.fence AS text)) END"""

# The job asks for exact rows, and the pipeline has none, or others than those that it began with.
LACKS_EXACT_ROWS = f"""(jobs.params @> '{{"exact": true}}'
    AND NOT (pipelines.exact AND coalesce(jobs.exactness = {EXACTNESS}, true)))"""

# What a head may claim. Locked by a separate statement: CLAIM must see all that the last holder
# committed.
CLAIMABLE = f"""
FROM jobs JOIN pipelines ON pipelines.id = :pipeline
WHERE jobs.id = ANY(CAST(:ids AS uuid[])) AND jobs.state = 'queued' AND jobs.prepared_at IS NOT NULL
    AND jobs.cancel_requested_at IS NULL AND jobs.not_before <= now()
    AND (jobs.deadline_at IS NULL OR jobs.deadline_at > now())
    AND jobs.model = pipelines.model AND pipelines.epoch = :epoch
    AND (jobs.exactness IS NULL OR jobs.exactness = {EXACTNESS} OR NOT jobs.exact
        OR coalesce(jobs.requeued_at, jobs.created_at)
            <= now() - make_interval(secs => :exact_wait_s))
    AND NOT {LACKS_EXACT_ROWS}
    AND {KNOWN_TOKENS} <= pipelines.kv_tokens
    AND (jobs.crashes = 0 OR :with_quarantined)
    AND jobs.paused_by IS NULL AND {PAUSED_BY} IS NULL
"""

LOCK_CLAIMABLE = text(f"""
SELECT jobs.id, jobs.fence, jobs.params, {IS_LIMITED} AS is_limited
{CLAIMABLE} FOR NO KEY UPDATE OF jobs SKIP LOCKED
""")

FIND_CLAIMABLE = text(f"SELECT jobs.id {CLAIMABLE}")

LOCK_UNFIT = text(f"""
SELECT jobs.id FROM jobs JOIN pipelines ON pipelines.id = :pipeline
WHERE jobs.id = ANY(CAST(:ids AS uuid[])) AND jobs.state = 'queued' AND jobs.model = pipelines.model
    AND jobs.prepared_at IS NOT NULL
    AND ({KNOWN_TOKENS} > pipelines.kv_tokens OR {LACKS_EXACT_ROWS})
FOR NO KEY UPDATE OF jobs SKIP LOCKED
""")  # noqa: S608 (constants of ours)

# Out of the window of what is sent ahead, so that rows which no head here can run do not fill it.
DEFER = text("""
UPDATE jobs SET sent_at = NULL, num_sends = 0, not_before = now() + make_interval(secs => :wait_s)
WHERE id = ANY(CAST(:ids AS uuid[])) AND state = 'queued'
""")

CLAIM = text(f"""
-- The rows that are locked, under their next fence. A job stays exact while all that compute it
-- have one exactness.
WITH claimed AS (
    UPDATE jobs SET state = 'running', fence = fence + 1,
        lease_until = now() + make_interval(secs => :lease_s),
        worker = :worker, pipeline = :pipeline,
        exact = jobs.exact AND coalesce(exactness = {EXACTNESS}, true)
            AND (SELECT pipelines.exact FROM pipelines WHERE pipelines.id = :pipeline),
        exactness = coalesce(exactness, {EXACTNESS})
    WHERE id = ANY(CAST(:ids AS uuid[])) AND state = 'queued'
    RETURNING *
),
-- An attempt for each of them: it goes on from the tokens that the attempt before it saved.
attempt AS (
    INSERT INTO attempts (
        job_id, fence, pipeline, epoch, worker, fingerprint, exactness, num_resumed, tokens,
        logprobs)
    SELECT claimed.id, claimed.fence, :pipeline, :epoch, :worker, :fingerprint, :exactness,
        coalesce(cardinality(previous.tokens), 0), coalesce(previous.tokens, '{{}}'),
        previous.logprobs
    FROM claimed LEFT JOIN attempts AS previous
        ON previous.job_id = claimed.id AND previous.fence = claimed.fence - 1
    RETURNING job_id, tokens, logprobs
)
SELECT claimed.id, claimed.fence, claimed.tenant_id, claimed.prompt_ids, claimed.params,
    claimed.max_tokens, claimed.seed, claimed.priority, claimed.crashes, claimed.retry,
    claimed.exact, attempt.tokens, attempt.logprobs, claimed.traceparent,
    claimed.messages IS NOT NULL AS is_chat,
    extract(epoch FROM now() - greatest(
        claimed.created_at, claimed.not_before, claimed.requeued_at))::float8 AS queued_s,
    extract(epoch FROM now() - greatest(
        claimed.created_at, claimed.not_before))::float8 AS due_s,
    extract(epoch FROM now() - claimed.created_at)::float8 AS age_s
FROM claimed JOIN attempt ON attempt.job_id = claimed.id
ORDER BY claimed.priority, claimed.created_at, claimed.id
""")  # noqa: S608 (constants of ours)

PARK = text("""
UPDATE attempts SET parked = true
FROM jsonb_to_recordset(CAST(:keys AS jsonb)) AS keys(job_id uuid, fence bigint)
WHERE attempts.job_id = keys.job_id AND attempts.fence = keys.fence AND ended_at IS NULL
""")

BEGIN = text("""
-- The claims that are to begin.
WITH keys AS (
    SELECT * FROM jsonb_to_recordset(CAST(:keys AS jsonb)) AS keys(job_id uuid, fence bigint)
),
-- Those that are still held: a relay may be about to requeue what is locked.
locked AS (
    SELECT jobs.id, jobs.fence
    FROM jobs JOIN keys ON keys.job_id = jobs.id AND keys.fence = jobs.fence
    WHERE jobs.state = 'running' FOR NO KEY UPDATE OF jobs SKIP LOCKED
)
UPDATE attempts SET parked = false
FROM locked WHERE attempts.job_id = locked.id AND attempts.fence = locked.fence
RETURNING attempts.job_id
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedJob:
    """A job that is ours until its lease ends, with all that earlier attempts saved."""

    job_id: UUID
    fence: int
    tenant_id: str
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
    queued_s: float
    """Since it was accepted, due or requeued, whichever was last."""
    due_s: float
    """Since it was accepted or due, whichever was last: attempts before this one are in it."""
    age_s: float
    """Since it was accepted."""
    retry: RetryPolicy | None = None
    traceparent: str | None = None
    """The caller's span, as it came with the job."""
    adapter: str | None = None
    """The fingerprint of its adapter, if the claimant knew it."""
    is_chat: bool = False
    """Its prompt was rendered from messages: its text is read as a reply."""
    parked: bool = False
    """It waits here for KV: nothing of it is computed before `begin_held`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimant:
    """The head that claims, and its pipeline in the present epoch."""

    worker: str
    pipeline: str
    epoch: int
    fingerprint: str
    """Of the weights."""
    exactness: str
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of those that it has, by name."""


def claim(
    connection: Connection,
    ids: Collection[UUID | str],
    claimant: Claimant,
    *,
    lease_s: float,
    exact_wait_s: float,
    with_quarantined: bool = True,
) -> list[ClaimedJob]:
    """Take those that may run now, of the pipeline's model and while its epoch lasts. The others:
    drop their messages. A started job of another exactness is left alone for `exact_wait_s`, then
    taken with `exact` false; one that is longer than the pipeline's KV, or asks for exact rows that
    it lacks, is never taken; without `with_quarantined` none that an engine died under, also since
    the caller asked `crashes.quarantined`. A row that this release does not understand is left for
    a later head, or ends `failed` if none would: see `readable`. What is over the limit of a
    tenant's running jobs is sent again. For what another transaction has locked see `held_up`."""
    head = _head(claimant)
    wanted = _wanted(ids, exact_wait_s, with_quarantined=with_quarantined)
    locked = connection.execute(LOCK_CLAIMABLE, {**head, **wanted}).all()
    over = over_limit(connection, [row.id for row in locked if row.is_limited])
    if over:
        connection.execute(DEFER, {"ids": list(over), "wait_s": LIMIT_WAIT_S})
    readable = _readable(connection, [row for row in locked if row.id not in over])
    if not readable:
        return []
    values = {**asdict(claimant), **head, "ids": readable, "lease_s": lease_s}
    return [_claimed(row, claimant.adapters) for row in connection.execute(CLAIM, values)]


def held_up(
    connection: Connection,
    ids: Collection[UUID | str],
    claimant: Claimant,
    *,
    exact_wait_s: float,
    with_quarantined: bool = True,
) -> set[UUID]:
    """Those that `claim` has just left, although they may run now: another transaction had their
    rows locked."""
    wanted = _wanted(ids, exact_wait_s, with_quarantined=with_quarantined)
    return set(connection.scalars(FIND_CLAIMABLE, {**_head(claimant), **wanted}))


def postpone_unfit(
    connection: Connection, ids: Collection[UUID | str], claimant: Claimant, *, wait_s: float
) -> set[UUID]:
    """Those that are too long for the KV of this pipeline, or ask for exact rows that it lacks:
    sent again after a while, when another one may take them. Returns them."""
    head = {
        "pipeline": claimant.pipeline,
        "exactness": claimant.exactness,
        "adapters": dump(claimant.adapters),
    }
    unfit = list(connection.scalars(LOCK_UNFIT, {**head, "ids": [str(job_id) for job_id in ids]}))
    if unfit:
        connection.execute(DEFER, {"ids": unfit, "wait_s": wait_s})
    return set(unfit)


def park(connection: Connection, keys: Collection[Key]) -> None:
    """Marks that these wait in their head, in the transaction of their claim, or that it gave them
    up, also while their rows are locked. That their leases expire is no crash of theirs."""
    connection.execute(PARK, {"keys": dump_keys(keys)})


def begin_held(connection: Connection, keys: Collection[Key]) -> set[UUID]:
    """Parked jobs run from now on: to be committed before the first of their tokens is computed. A
    job that is missing is not ours any more, or locked by another transaction."""
    return set(connection.scalars(BEGIN, {"keys": dump_keys(keys)}))


def _head(claimant: Claimant) -> dict[str, Any]:
    return {
        "pipeline": claimant.pipeline,
        "epoch": claimant.epoch,
        "exactness": claimant.exactness,
        "adapters": dump(claimant.adapters),
    }


def _wanted(
    ids: Collection[UUID | str], exact_wait_s: float, *, with_quarantined: bool
) -> dict[str, Any]:
    return {
        "ids": [str(job_id) for job_id in ids],
        "exact_wait_s": exact_wait_s,
        "with_quarantined": with_quarantined,
    }


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
    end_queued(connection, ends)
    return found.readable


def _claimed(row: Row[Any], adapters: Mapping[str, str]) -> ClaimedJob:
    params = load_params(row.params)
    return ClaimedJob(
        job_id=row.id,
        fence=row.fence,
        tenant_id=row.tenant_id,
        prompt_ids=tuple(row.prompt_ids),
        output_ids=tuple(row.tokens),
        logprobs=load_logprobs(row.logprobs),
        params=params,
        max_tokens=row.max_tokens,
        seed=row.seed,
        priority=row.priority,
        crashes=row.crashes,
        retry=readable_retry(row.retry),
        exact=row.exact,
        queued_s=row.queued_s,
        due_s=row.due_s,
        age_s=row.age_s,
        traceparent=row.traceparent,
        adapter=adapters.get(params.adapter or ""),
        is_chat=row.is_chat,
    )
