"""Repeated requests: which job they mean, and whether they ask for the same. One rule for ids and
keys, at every door.

What counts is what was asked for: tenant, model, what to complete, its parents, and the sampling
parameters.
What does not count is how it is served (priority, delay, deadline, `max_crashes`, `retry`),
metadata and traceparent: who asks again may have less time left, and a new trace. Nor does what
preparation adds to a row: a drawn seed, the ids of a text. Both sides are compared as Postgres
holds them, so that nothing depends on how a client spells a list or a number.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, text

from shardline.base.errors import Busy, Conflict, ShardlineError
from shardline.contract.job import JobState

# Not all: the table may have columns of its operator's, also one with the name that is added.
COMPARED = """id, error, state, created_at, finished_at, tenant_id, model, params, prompt,
        messages, prompt_ids, depends_on, on_parent_failure"""

REPEATED = text(f"""
SELECT asked.number, jobs.name, jobs.id, jobs.error,
    -- Its row only records why the request was refused: what is valid now is another request.
    jobs.state = '{JobState.FAILED}' AND jobs.finished_at = jobs.created_at AS is_refused,
    array_remove(ARRAY[
        CASE WHEN jobs.tenant_id <> asked.tenant_id THEN 'tenant' END,
        -- Preparation takes `model:adapter` apart.
        CASE WHEN concat_ws(':', jobs.model, jobs.params ->> 'adapter')
            <> concat_ws(':', asked.model, asked.params ->> 'adapter') THEN 'model' END,
        CASE WHEN jobs.prompt IS DISTINCT FROM asked.prompt
            -- Ids are the prompt only where there is no text: else a tokenizer made them.
            OR CASE WHEN num_nonnulls(jobs.prompt, jobs.messages) = 0 THEN jobs.prompt_ids END
                IS DISTINCT FROM
                CASE WHEN num_nonnulls(asked.prompt, asked.messages) = 0 THEN asked.prompt_ids END
            THEN 'prompt' END,
        CASE WHEN jobs.messages IS DISTINCT FROM asked.messages THEN 'messages' END,
        CASE WHEN jobs.depends_on IS DISTINCT FROM asked.depends_on THEN 'depends_on' END,
        CASE WHEN jobs.on_parent_failure <> asked.on_parent_failure THEN 'on_parent_failure' END
    ], NULL) || ARRAY(
        SELECT key
        FROM jsonb_each(jobs.params) AS one FULL JOIN jsonb_each(asked.params) AS other USING (key)
        WHERE one.value IS DISTINCT FROM other.value AND key <> 'adapter' ORDER BY key
    ) AS differences
FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS asked(
    number int, id uuid, tenant_id text, model text, prompt text, messages jsonb,
    prompt_ids int[], params jsonb, depends_on jsonb, on_parent_failure text,
    idempotency_key text)
-- The job of its id and the job of its key: one job, two, or none.
CROSS JOIN LATERAL (
    SELECT 'id' AS name, {COMPARED} FROM jobs WHERE jobs.id = asked.id
    UNION ALL
    SELECT 'idempotency key', {COMPARED} FROM jobs
    WHERE jobs.tenant_id = asked.tenant_id AND jobs.idempotency_key = asked.idempotency_key
) AS jobs
WHERE asked.number = ANY(CAST(:numbers AS int[]))
""")  # noqa: S608 (a constant of ours)


def repeated(
    connection: Connection, rows: str, numbers: Collection[int]
) -> dict[int, UUID | ShardlineError]:
    """The jobs that are there for those of `rows` (JSON, numbered by `number`) that were not
    inserted. For one that asks for something else a Conflict, and Busy for one that is not to be
    seen: it went, or the caller's snapshot is old. A row's error is only its own: those next to it
    have their jobs."""
    found: dict[int, list[Row[Any]]] = {number: [] for number in numbers}
    for row in connection.execute(REPEATED, {"rows": rows, "numbers": list(numbers)}):
        found[row.number].append(row)
    return {number: _outcome(jobs) for number, jobs in found.items()}


def _outcome(jobs: Sequence[Row[Any]]) -> UUID | ShardlineError:
    """What one row's id and key lead to: no job, one, or two."""
    if not jobs:
        return Busy(
            "a job with the same id or idempotency key went meanwhile, "
            "or is hidden from this transaction"
        )
    for row in jobs:
        if (problem := _conflict(row)) is not None:
            return problem
    first = jobs[0]
    last = jobs[-1]
    if first.id != last.id:
        return Conflict(
            f"its {first.name} is that of job {first.id}, "
            f"its {last.name} that of {last.id}; send one"
        )
    return UUID(str(first.id))


def _conflict(first: Row[Any]) -> Conflict | None:
    if "tenant" in first.differences:
        # Of another tenant's job nothing may be guessed, its content least of all.
        return Conflict(f"the id {first.id} is taken; use a new one")
    remedy = f"use a new {first.name}"
    if first.is_refused:
        problem = (first.error or {}).get("problem")
        return Conflict(
            f"job {first.id} has this {first.name} and was refused as invalid ({problem}); {remedy}"
        )
    if first.differences:
        others = ", ".join(first.differences)
        return Conflict(f"job {first.id} has this {first.name} and another {others}; {remedy}")
    return None
