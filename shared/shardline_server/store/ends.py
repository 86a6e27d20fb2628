"""How a job leaves a state: it ends, or a claim is given up and the job is queued again. Knows no
reason.

Each write is conditional on the state that the job leaves and on its fence: of two writers the
first wins.
Locks: rows of `jobs` with SKIP LOCKED, before any of their attempts is written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, text

from shardline.contract.job import JobState, Result
from shardline.contract.tables import DONE_CHANNEL, JOBS_CHANNEL
from shardline.store.connection.encoding import Key, dump, dump_keys, dump_result
from shardline.store.connection.notify import ring, ring_ids

END = text("""
-- What the caller has: a claim, the state that it ends in, and the columns of its result
-- or its error.
WITH ends AS (
    SELECT * FROM jsonb_to_recordset(CAST(:ends AS jsonb)) AS ends(
        job_id uuid, fence bigint, state text, error jsonb, text text, token_ids int[],
        prompt_tokens int, completion_tokens int, cached_tokens int, finish_reason text,
        logprobs jsonb, reasoning text, reasoning_tokens int, tool_calls jsonb,
        prompt_logprobs jsonb, exact bool, timings jsonb, provenance jsonb, choice text,
        probability float8, confidence float8, score float8, probabilities float8[],
        label_mass float8, embedding real[])
),
-- Jobs that are still in the state that they are to leave, under the same fence, and not locked
-- elsewhere.
locked AS (
    SELECT jobs.id FROM jobs JOIN ends ON ends.job_id = jobs.id AND ends.fence = jobs.fence
    WHERE jobs.state = :left FOR NO KEY UPDATE OF jobs SKIP LOCKED
),
-- Their end: nothing changes them after this.
ended AS (
    UPDATE jobs SET state = ends.state, error = ends.error, finished_at = now(), lease_until = NULL
    FROM locked, ends
    WHERE jobs.id = locked.id AND ends.job_id = jobs.id AND ends.fence = jobs.fence
        AND jobs.state = :left
    RETURNING jobs.id, jobs.fence, jobs.state, jobs.exact
),
-- Their last attempts, with all tokens. A queued job's attempt ended before and keeps its outcome.
attempt AS (
    UPDATE attempts SET ended_at = coalesce(ended_at, now()),
        outcome = coalesce(outcome, ended.state),
        tokens = coalesce(ends.token_ids, tokens),
        logprobs = CASE WHEN ends.token_ids IS NULL THEN attempts.logprobs ELSE ends.logprobs END
    FROM ended JOIN ends ON ends.job_id = ended.id
    WHERE attempts.job_id = ended.id AND attempts.fence = ended.fence
),
-- Their results, in the same statement: there is never an end without its result.
result AS (
    INSERT INTO results (
        job_id, fence, text, token_ids, prompt_tokens, completion_tokens, cached_tokens,
        finish_reason, logprobs, reasoning, reasoning_tokens, tool_calls, prompt_logprobs,
        exact, timings, provenance, choice, probability, confidence, score, probabilities,
        label_mass, embedding)
    SELECT ended.id, ended.fence, ends.text, ends.token_ids, ends.prompt_tokens,
        ends.completion_tokens, ends.cached_tokens, ends.finish_reason, ends.logprobs,
        ends.reasoning, ends.reasoning_tokens, ends.tool_calls, ends.prompt_logprobs,
        ends.exact AND ended.exact, ends.timings, ends.provenance, ends.choice, ends.probability,
        ends.confidence, ends.score, ends.probabilities, ends.label_mass,
        ends.embedding
    FROM ended JOIN ends ON ends.job_id = ended.id WHERE ends.finish_reason IS NOT NULL
)
SELECT id, state FROM ended
""")

# From 0 to 1, derived from a job's attempt: a repeat has the same.
JITTER = """CAST(CAST('x' || left(md5(concat(jobs.id, '/', jobs.fence)), 8) AS bit(32)) AS bigint)
            / 4294967296.0"""

STATES_UNDER = text("""
SELECT jobs.id, jobs.state
FROM jobs JOIN jsonb_to_recordset(CAST(:keys AS jsonb)) AS keys(job_id uuid, fence bigint)
    ON keys.job_id = jobs.id AND keys.fence = jobs.fence
WHERE jobs.state <> 'queued'
""")

REQUEUE = text(f"""
-- The claims to give up.
WITH keys AS (
    SELECT * FROM jsonb_to_recordset(CAST(:keys AS jsonb))
        AS keys(job_id uuid, fence bigint, wait_s float8)
),
-- Those that are still held, and not locked elsewhere.
locked AS (
    SELECT jobs.id FROM jobs JOIN keys ON keys.job_id = jobs.id AND keys.fence = jobs.fence
    WHERE jobs.state = 'running' FOR NO KEY UPDATE OF jobs SKIP LOCKED
),
-- Due to be sent at once, or after half to all of a wait: jobs that failed together do not come
-- back together. A crash counts, progress forgets those before, all else leaves the count as it is.
requeued AS (
    UPDATE jobs SET state = 'queued', lease_until = NULL, worker = NULL, pipeline = NULL,
        requeued_at = now(), sent_at = NULL, num_sends = 0,
        not_before = CASE WHEN keys.wait_s IS NULL THEN jobs.not_before
            ELSE now() + make_interval(secs => keys.wait_s * (0.5 + 0.5 * {JITTER})) END,
        crashes = CASE CAST(:outcome AS text)
            WHEN 'crashed' THEN crashes + 1 WHEN 'lost' THEN 0 ELSE crashes END
    FROM locked, keys
    WHERE jobs.id = locked.id AND keys.job_id = jobs.id AND keys.fence = jobs.fence
        AND jobs.state = 'running'
    RETURNING jobs.id, jobs.fence
),
-- Their attempts end; the next ones go on from the tokens of these.
attempt AS (
    UPDATE attempts SET ended_at = now(), outcome = :outcome
    FROM requeued WHERE attempts.job_id = requeued.id AND attempts.fence = requeued.fence
)
SELECT id FROM requeued
""")  # noqa: S608 (a constant of ours)


NO_WAITS: Mapping[Key, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """A terminal state with its result (also partial: cancelled, expired) or its error."""

    job_id: UUID
    fence: int
    state: JobState
    result: Result | None = None
    error: Mapping[str, Any] | None = None


def end_running(connection: Connection, ends: Sequence[End]) -> dict[UUID, JobState]:
    """End running jobs under their fences. Returns those that are ended under them now, with the
    state that counts: also those that this same call ended before an answer was lost. `running`:
    another transaction has the row locked, so try again. The others are not ours any more: drop
    them."""
    return _end(connection, ends, JobState.RUNNING)


def end_queued(connection: Connection, ends: Sequence[End]) -> dict[UUID, JobState]:
    """Ends jobs that wait, as `end_running` does: their fence is that of the last claim, 0 before
    the first one."""
    return _end(connection, ends, JobState.QUEUED)


def release_running(connection: Connection, keys: Collection[Key]) -> set[UUID]:
    """Give jobs back: `queued`, no crash counted, sent again at once."""
    return requeue_running(connection, keys, outcome="released")


def requeue_running(
    connection: Connection,
    keys: Collection[Key],
    *,
    outcome: str,
    waits: Mapping[Key, float] = NO_WAITS,
) -> set[UUID]:
    """`running` → `queued` under the fence. The outcome of the attempt is `released`, `crashed`
    (one crash more), `failed`, or `lost`, which forgets crashes: the attempt got further, so no
    engine breaks where the last ones did. `waits` are seconds until the next attempt, at most."""
    if not keys:
        return set()
    rows = [{"job_id": key[0], "fence": key[1], "wait_s": waits.get(key)} for key in keys]
    requeued = set(connection.scalars(REQUEUE, {"keys": dump(rows), "outcome": outcome}))
    if requeued:
        ring(connection, JOBS_CHANNEL)
    return requeued


def _end(connection: Connection, ends: Sequence[End], left: JobState) -> dict[UUID, JobState]:
    """`left` is the state that they must be in."""
    if not ends:
        return {}
    rows = [_end_row(one) for one in ends]
    ended = {
        row.id: JobState(row.state)
        for row in connection.execute(END, {"ends": dump(rows), "left": left})
    }
    if ended:
        ring_ids(connection, DONE_CHANNEL, ended)
    others = [(one.job_id, one.fence) for one in ends if one.job_id not in ended]
    if others:
        before = connection.execute(STATES_UNDER, {"keys": dump_keys(others)})
        ended |= {row.id: JobState(row.state) for row in before}
    return ended


def _end_row(one: End) -> dict[str, Any]:
    assert one.state.terminal, one.state
    row: dict[str, Any] = {
        "job_id": one.job_id,
        "fence": one.fence,
        "state": one.state,
        "error": one.error,
    }
    return row if one.result is None else row | dump_result(one.result)
