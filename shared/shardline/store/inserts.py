"""New rows in `jobs`: thousands in one statement, a repeat inserts nothing. Knows no tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import msgspec
from psycopg.errors import Diagnostic
from sqlalchemy import Connection, RowMapping, select, text, tuple_
from sqlalchemy.exc import IntegrityError

from shardline.errors import Conflict, Invalid
from shardline.ids import new_id
from shardline.job import DEFAULT_TENANT, JobRequest
from shardline.store.encoding import MAX_DEPTH, dump, is_any, storable, unstorable
from shardline.tables import MAX_PROMPT_BYTES, RANDOM_SEED, jobs

MAX_ROWS = 2_000
MAX_CHARS = 8 << 20
"""Of prompts in one statement; one longer prompt travels alone."""

Tokenised = tuple[Sequence[int], int]
"""A request's prompt ids and max_tokens, of a door that validated and tokenised it already."""

INSERT = text(f"""
WITH new AS (
    SELECT * FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS new(
        id uuid, tenant text, model text, prompt text, messages jsonb, prompt_ids int[], params jsonb, seed bigint,
        priority smallint, idempotency_key text, metadata jsonb, traceparent text, delay_s float8, deadline_s float8,
        max_tokens int, max_crashes int)
)
INSERT INTO jobs (
    id, tenant_id, model, prompt, messages, prompt_ids, params, seed, priority, idempotency_key, metadata, traceparent,
    not_before, deadline_at, max_tokens, max_crashes, prepared_at)
SELECT
    id, tenant, model, prompt, messages, prompt_ids, params, coalesce(seed, {RANDOM_SEED}), priority, idempotency_key,
    metadata, traceparent, now() + make_interval(secs => delay_s), now() + make_interval(secs => deadline_s),
    max_tokens, max_crashes, CASE WHEN max_tokens IS NOT NULL THEN now() END
FROM new ON CONFLICT DO NOTHING RETURNING id
""")  # noqa: S608 (a constant of ours)

INSERT_FAILED = text("""
INSERT INTO jobs (id, model, prompt, metadata, error, state, finished_at)
SELECT id, model, prompt, metadata, error, 'failed', now()
FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS new(id uuid, model text, prompt text, metadata jsonb, error jsonb)
ON CONFLICT DO NOTHING RETURNING id
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRequest:
    """A request that can never run, kept as a `failed` row so that its producer learns why."""

    id: UUID
    model: str
    error: Mapping[str, Any]
    prompt: str | None = None
    metadata: Mapping[str, Any] | None = None


def insert_jobs(
    connection: Connection, requests: Sequence[JobRequest], *, prepared: Sequence[Tokenised | None] | None = None
) -> list[UUID]:
    """The ids of the rows that hold these requests, in their order; they are accepted once the caller commits.

    A known id or idempotency key inserts nothing and returns the job that has it. Raises Conflict when that job asks
    for something else, Invalid when Postgres cannot hold the request.
    """
    rows = [_row(request, tokenised) for request, tokenised in _pairs(requests, prepared)]
    inserted: set[UUID] = set()
    try:
        for chunk in _chunks(rows):
            inserted.update(connection.scalars(INSERT, {"rows": dump(chunk)}))
    except IntegrityError as error:
        raise _invalid(error) from error
    repeated = [row for row in rows if not _take(inserted, row["id"])]
    existing = _existing(connection, repeated) if repeated else {}
    others = {id(row): _same(row, existing) for row in repeated}
    return [others.get(id(row), row["id"]) for row in rows]


def insert_failed(connection: Connection, requests: Sequence[FailedRequest]) -> set[UUID]:
    """Requests with their reason, as rows that ended before they began. Returns those that were new."""
    rows = [
        {
            "id": request.id,
            "model": storable(request.model),
            "prompt": None if request.prompt is None else storable(request.prompt)[: MAX_PROMPT_BYTES // 4],
            "metadata": {} if request.metadata is None or unstorable(request.metadata) else request.metadata,
            "error": {name: storable(str(value)) for name, value in request.error.items()},
        }
        for request in requests
    ]
    return set(connection.scalars(INSERT_FAILED, {"rows": dump(rows)})) if rows else set()


def _take(inserted: set[UUID], job_id: UUID) -> bool:
    """Whether this row was inserted: the first of several with one id was."""
    if job_id not in inserted:
        return False
    inserted.remove(job_id)
    return True


def _pairs(
    requests: Sequence[JobRequest], prepared: Sequence[Tokenised | None] | None
) -> Iterable[tuple[JobRequest, Tokenised | None]]:
    return zip(requests, prepared if prepared is not None else [None] * len(requests), strict=True)


def _row(request: JobRequest, tokenised: Tokenised | None) -> dict[str, Any]:
    text_prompt = request.prompt if isinstance(request.prompt, str) else None
    given_ids = None if isinstance(request.prompt, str) else request.prompt
    prompt_ids, max_tokens = tokenised or (given_ids, None)
    row = {
        "id": request.id or new_id(),
        "tenant": request.tenant,
        "model": request.model,
        "prompt": text_prompt,
        "messages": msgspec.to_builtins(request.messages),
        "prompt_ids": prompt_ids,
        "params": msgspec.to_builtins(request.params()),
        "seed": request.seed,
        "priority": request.priority,
        "idempotency_key": request.idempotency_key,
        "metadata": request.metadata,
        "traceparent": request.traceparent,
        "delay_s": request.delay_s,
        "deadline_s": request.deadline_s,
        "max_tokens": max_tokens,
        "max_crashes": request.max_crashes,
    }
    _check_storable(row)
    return row


def _check_storable(row: Mapping[str, Any]) -> None:
    for name, value in row.items():
        if not isinstance(value, int | float | None) and name not in ("id", "prompt_ids") and unstorable(value):
            problem = f"it holds a NUL character or a lone surrogate, or is nested more than {MAX_DEPTH} deep"
            raise Invalid(name, problem, "Change it: Postgres cannot store it")


def _chunks(rows: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    chunk: list[dict[str, Any]] = []
    num_chars = 0
    for row in rows:
        size = len(row["prompt"] or "") + 8 * len(row["prompt_ids"] or ())
        if chunk and (len(chunk) == MAX_ROWS or num_chars + size > MAX_CHARS):
            yield chunk
            chunk, num_chars = [], 0
        chunk.append(row)
        num_chars += size
    if chunk:
        yield chunk


def _existing(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> dict[object, RowMapping]:
    """Rows that were there first, by id and by (tenant, key)."""
    content = select(
        jobs.c.id,
        jobs.c.tenant_id,
        jobs.c.idempotency_key,
        jobs.c.model,
        jobs.c.prompt,
        jobs.c.messages,
        jobs.c.prompt_ids,
    )
    keys = [(row["tenant"], row["idempotency_key"]) for row in rows if row["idempotency_key"] is not None]
    by_id = connection.execute(content.where(is_any(jobs.c.id, [row["id"] for row in rows])))
    found: dict[object, RowMapping] = {row["id"]: row for row in by_id.mappings()}
    if keys:
        by_key = connection.execute(content.where(tuple_(jobs.c.tenant_id, jobs.c.idempotency_key).in_(keys)))
        found |= {(row["tenant_id"], row["idempotency_key"]): row for row in by_key.mappings()}
    return found


def _same(row: Mapping[str, Any], existing: Mapping[object, RowMapping]) -> UUID:
    """The id of the job that was there first, if it asks for the same."""
    key = (row["tenant"], row["idempotency_key"])
    first = existing.get(row["id"]) or existing.get(key)
    if first is None:
        raise Conflict(f"job {row['id']} or its idempotency key is being inserted by another transaction; try again")
    if _content(first) != _content(row):
        raise Conflict(f"job {first['id']} has this id or idempotency key and another model or prompt; use a new one")
    return UUID(str(first["id"]))


def _content(row: RowMapping | Mapping[str, Any]) -> tuple[object, ...]:
    """What makes two requests the same one. Ids count only where there is no text: preparation adds them to it."""
    has_text = row["prompt"] is not None or row["messages"] is not None
    return row["model"], row["prompt"], row["messages"], None if has_text else list(row["prompt_ids"] or ())


def _invalid(error: IntegrityError) -> Invalid:
    """The CHECK or foreign key that refused a row, as our error: constraints are named for what they want."""
    diagnostic: Diagnostic | None = getattr(error.orig, "diag", None)
    constraint = (diagnostic and diagnostic.constraint_name) or "jobs"
    if constraint == "jobs_tenant_id_fkey":
        return Invalid("tenant", "no tenant has this name", f"Leave it out to use {DEFAULT_TENANT!r}")
    rule = constraint.removeprefix("jobs_").replace("_", " ")
    return Invalid(rule.split(" ", 1)[0], f"the row breaks the rule: {rule}", "See docs/jobs.md for fields and limits")
