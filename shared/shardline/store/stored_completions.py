"""Chat completions that their callers asked to store: found, listed, changed and forgotten, of one
tenant. The rows are those of jobs; what is forgotten here stays a job until its retention passes.

Locks: the first rows of completions, one in a statement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, text

from shardline.base.errors import Invalid, NotFound
from shardline.contract.job import Job
from shardline.store.choices import other_choices
from shardline.store.connection.encoding import dump
from shardline.store.jobs import get_jobs

MAX_PAGE_CHOICES = 512
"""Jobs that one page reads: it ends before the completion that would be over it, and has one at
least."""

# All choices of a completion have succeeded. The first one stands for itself.
IS_THERE = """
stored IS NOT NULL AND state = 'succeeded' AND NOT EXISTS (
    SELECT FROM jobs AS others WHERE others.choice_of = jobs.id AND others.state <> 'succeeded')
"""
FIND = text(f"""
SELECT id, messages, stored FROM jobs
WHERE id = ANY(CAST(:ids AS uuid[])) AND tenant_id = :tenant AND {IS_THERE}
""")  # noqa: S608 (constants of ours)

# By jobs_stored or jobs_stored_by_model, in their order. The limit is a literal, so that the
# planner walks an index instead of sorting what it matches.
PAGE = """
SELECT jobs.id, CASE WHEN choice_of IS NULL THEN 1 ELSE (
    SELECT count(*) FROM jobs AS others WHERE others.choice_of = jobs.id) END AS num
FROM jobs WHERE tenant_id = :tenant AND {is_there} {rules}
ORDER BY created_at {order}, id {order} LIMIT {limit}
"""
END = text("SELECT created_at FROM jobs WHERE id = :id AND tenant_id = :tenant")
CHANGE = text(f"""
UPDATE jobs SET metadata = CAST(:metadata AS jsonb)
WHERE id = :id AND tenant_id = :tenant AND {IS_THERE} RETURNING id
""")  # noqa: S608 (constants of ours)
FORGET = text(f"""
UPDATE jobs SET stored = NULL
WHERE id = :id AND tenant_id = :tenant AND {IS_THERE} RETURNING id
""")  # noqa: S608 (constants of ours)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCompletion:
    """A completion with its choices, and what was asked."""

    jobs: tuple[Job, ...]
    messages: Sequence[Mapping[str, Any]]
    stored: Mapping[str, Any]
    """What its answer had and the rows lack."""


def get_stored(connection: Connection, job_id: UUID, *, tenant: str) -> StoredCompletion:
    """Raises NotFound for one that is not stored, has not ended well, or is another tenant's."""
    found = _completions(connection, [job_id], tenant)
    if not found:
        raise _not_found(job_id)
    return found[0]


def list_stored(
    connection: Connection,
    *,
    tenant: str,
    model: str | None,
    metadata: Mapping[str, str],
    limit: int,
    after: UUID | None,
    is_ascending: bool,
) -> tuple[list[StoredCompletion], bool]:
    """Reads a page behind `after`, and whether there are more. Raises Invalid for an `after` that
    is not there."""
    values: dict[str, Any] = {"tenant": tenant, "model": model, "metadata": dump(metadata)}
    rules = "" if model is None else "AND model = :model"
    rules += " AND metadata @> CAST(:metadata AS jsonb)" if metadata else ""
    if after is not None:
        at = connection.scalar(END, {"id": after, "tenant": tenant})
        if at is None:
            problem = f"there is no completion {after}; it may have been deleted"
            raise Invalid("after", problem, "List from the start")
        rules += f" AND (created_at, id) {'>' if is_ascending else '<'} (:at, :after)"
        values |= {"at": at, "after": after}
    order = "ASC" if is_ascending else "DESC"
    query = text(PAGE.format(is_there=IS_THERE, rules=rules, order=order, limit=limit + 1))
    rows = connection.execute(query, values).all()
    ids: list[UUID] = []
    num_choices = 0
    for row in rows[:limit]:
        num_choices += row.num
        if ids and num_choices > MAX_PAGE_CHOICES:
            break
        ids.append(row.id)
    return _completions(connection, ids, tenant), len(rows) > len(ids)


def change_stored(
    connection: Connection, job_id: UUID, metadata: Mapping[str, Any], *, tenant: str
) -> StoredCompletion:
    """Replaces its metadata. Raises NotFound."""
    values = {"id": job_id, "tenant": tenant, "metadata": dump(metadata)}
    if connection.scalar(CHANGE, values) is None:
        raise _not_found(job_id)
    return get_stored(connection, job_id, tenant=tenant)


def forget_stored(connection: Connection, job_id: UUID, *, tenant: str) -> None:
    """Takes it out of what the other functions find. Raises NotFound."""
    if connection.scalar(FORGET, {"id": job_id, "tenant": tenant}) is None:
        raise _not_found(job_id)


def _completions(
    connection: Connection, ids: Sequence[UUID], tenant: str
) -> list[StoredCompletion]:
    """Those that are there, in the order of `ids`."""
    firsts = {row.id: row for row in connection.execute(FIND, {"ids": list(ids), "tenant": tenant})}
    others = other_choices(connection, list(firsts))
    choices = {first: (first, *others.get(first, ())) for first in ids if first in firsts}
    wanted = [job_id for each in choices.values() for job_id in each]
    jobs = {job.id: job for job in get_jobs(connection, wanted)}
    return [
        StoredCompletion(
            jobs=tuple(jobs[job_id] for job_id in each),
            messages=firsts[first].messages or (),
            stored=firsts[first].stored,
        )
        for first, each in choices.items()
    ]


def _not_found(job_id: UUID) -> NotFound:
    return NotFound(f"no stored completion has the id chatcmpl-{job_id}")
