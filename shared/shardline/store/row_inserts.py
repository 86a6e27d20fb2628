"""The statement that makes rows of `jobs`: in one trip it reserves what they may take of quotas,
and leaves out those that find no room. Knows no request and no repeat.

Locks: rows of `quota_use`, in order of id; those of tenants without quotas are not looked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import UUID

from psycopg.errors import Diagnostic
from sqlalchemy import Connection, text
from sqlalchemy.exc import IntegrityError

from shardline.base.errors import Invalid, LimitExceeded
from shardline.contract.job import DEFAULT_TENANT
from shardline.contract.parents.parent_job import FIELD
from shardline.contract.tables import RANDOM_SEED
from shardline.store.tenants.limits import limit_error

FLEXIBLE_SHARE = 0.9
"""Of the time to its deadline, in which a flexible job may begin: the rest is for running it."""

INSERT = f"""
-- The requests of one statement, as `_row` writes them. Times arrive as seconds from now: only
-- Postgres's clock counts.
WITH new AS (
    SELECT * FROM ROWS FROM (jsonb_to_recordset(CAST(%(rows)s AS jsonb)) AS (
        id uuid, tenant_id text, model text, prompt text, messages jsonb, prompt_ids int[],
        params jsonb, seed bigint, priority smallint, idempotency_key text, metadata jsonb,
        traceparent text, delay_s float8, deadline_s float8, flexible text, max_tokens int,
        max_crashes int, choice_of uuid, choice_index smallint, stored jsonb, depends_on jsonb,
        on_parent_failure text, retry jsonb, number int, key_name text)) WITH ORDINALITY AS new
),
-- What those of tenants with quotas may take: the others have no row here.
measured AS (
    SELECT one || jsonb_build_object('number', number, 'tenant_id', tenant_id,
        'idempotency_key', idempotency_key) AS one
    FROM (
        SELECT * FROM new
        WHERE EXISTS (SELECT FROM quotas WHERE quotas.tenant_id = new.tenant_id) OFFSET 0
    ) AS new
    CROSS JOIN LATERAL (SELECT shardline_measure(
        id, tenant_id, key_name, model, prompt, messages, prompt_ids, params, max_tokens,
        choice_of, depends_on) AS one) AS measure
    WHERE one IS NOT NULL
),
-- Reserved under the locks of their quotas, or over one of them.
limited AS MATERIALIZED (
    SELECT each.* FROM (SELECT jsonb_agg(one) AS ones FROM measured HAVING count(*) > 0) AS all_of
    CROSS JOIN LATERAL shardline_reserve_each(all_of.ones) AS each
),
-- The others become rows, in the order in which they came: two statements with the same ids or keys
-- wait for each other, and never both.
inserted AS (
INSERT INTO jobs (
    id, tenant_id, model, prompt, messages, prompt_ids, params, seed, priority, idempotency_key,
    metadata, traceparent, not_before, deadline_at, max_tokens, max_crashes, choice_of,
    choice_index, stored, depends_on, on_parent_failure, retry, key_name, prepared_at)
SELECT
    id, tenant_id, model, prompt, messages, prompt_ids, params, coalesce(seed, {RANDOM_SEED}),
    priority, idempotency_key, metadata, traceparent,
    CASE WHEN flexible IS NULL THEN now() + make_interval(secs => delay_s)
        ELSE shardline_cheapest_moment(flexible, now() + make_interval(secs => delay_s),
            now() + make_interval(secs => {FLEXIBLE_SHARE} * deadline_s)) END,
    now() + make_interval(secs => deadline_s), max_tokens, max_crashes, choice_of,
    choice_index, stored, depends_on, on_parent_failure, retry, key_name,
    CASE WHEN max_tokens IS NOT NULL THEN now() END
FROM new
WHERE NOT EXISTS (
    SELECT FROM limited WHERE limited.number = new.number AND limited.excess IS NOT NULL)
ORDER BY ordinality
ON CONFLICT DO NOTHING RETURNING id
)
SELECT id, NULL::int AS number, NULL::jsonb AS excess FROM inserted
UNION ALL SELECT NULL, number, excess FROM limited
"""  # noqa: S608 (a constant of ours)

RELEASE = text("SELECT shardline_release(CAST(:ids AS uuid[]))")
DROP = text("""
DELETE FROM jobs WHERE id = :id OR choice_of = :id
""")


@dataclass(slots=True, kw_only=True)
class RowOutcomes:
    """What became of the rows of a statement, by their numbers; a repeat is nowhere among them."""

    inserted: set[UUID] = field(default_factory=set)
    """By their ids."""
    reserved: set[int] = field(default_factory=set)
    refused: dict[int, LimitExceeded] = field(default_factory=dict)


def insert_rows(connection: Connection, encoded: str) -> RowOutcomes:
    """Inserts numbered rows, in JSON. Raises what the driver does."""
    found = RowOutcomes()
    # As the driver has it: to look its text up takes SQLAlchemy longer than a row.
    for job_id, number, excess in connection.exec_driver_sql(INSERT, {"rows": encoded}):
        if job_id is not None:
            found.inserted.add(job_id)
        elif excess is None:
            found.reserved.add(number)
        else:
            found.refused[number] = limit_error(excess)
    return found


def release(connection: Connection, ids: Sequence[UUID]) -> None:
    """Gives back what jobs have reserved that were not inserted after all."""
    connection.execute(RELEASE, {"ids": ids})


def drop(connection: Connection, job_id: UUID) -> None:
    """Takes back a request of this transaction, with its choices."""
    connection.execute(DROP, {"id": job_id})


def invalid_row(error: IntegrityError) -> Invalid:
    """The CHECK or foreign key that refused a row, as our error: constraints are named for what
    they want."""
    diagnostic: Diagnostic | None = getattr(error.orig, "diag", None)
    constraint = (diagnostic and diagnostic.constraint_name) or "jobs"
    if diagnostic is not None and constraint == "jobs_depends_on":
        remedy = "Send ids of accepted jobs of the tenant, or of earlier ones of the same call"
        return Invalid(FIELD, str(diagnostic.message_primary), remedy)
    if constraint == "jobs_tenant_id_fkey":
        return Invalid(
            "tenant", "no tenant has this name", f"Leave it out to use {DEFAULT_TENANT!r}"
        )
    rule = constraint.removeprefix("jobs_").replace("_", " ")
    return Invalid(
        rule.split(" ", 1)[0],
        f"the row breaks the rule: {rule}",
        "See docs/jobs.md for fields and limits",
    )
