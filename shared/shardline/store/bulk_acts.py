"""Acts on all jobs that a filter names, in pages: cancelled, submitted again, or given another
priority.

What a page has done matches no more, so an act that was interrupted is completed by a repeat.
Locks: rows of `jobs` of one page, in order of id; each page is its caller's transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from types import MappingProxyType
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import (
    Boolean,
    ColumnElement,
    Connection,
    Select,
    any_,
    exists,
    func,
    literal_column,
    select,
    text,
    tuple_,
)

from shardline.base.errors import Invalid
from shardline.contract.batches.batch_tables import batch_lines
from shardline.contract.job import PRIORITIES, JobState
from shardline.contract.job_filter import JobFilter, JobKind
from shardline.contract.tables import JOBS_CHANNEL, jobs
from shardline.store import audit
from shardline.store.connection.encoding import is_any
from shardline.store.connection.notify import ring
from shardline.store.dead_letters import COPIED, COPIES, HAS_ITS_PARENTS
from shardline.store.jobs import request_cancel
from shardline.store.listing import PageEnd

PAGE_ROWS = 1_000
"""Of one transaction."""

MAX_COUNTED = 1_000_000
"""A count without an act goes no further."""


class Act(StrEnum):
    """What is done with each job."""

    CANCEL = "cancel"
    RETRY = "retry"
    """Submitted again as a new job, unless that was done."""
    PRIORITIZE = "prioritize"


STATES: Mapping[Act, tuple[JobState, ...]] = MappingProxyType(
    {
        Act.CANCEL: (JobState.QUEUED, JobState.RUNNING),
        Act.RETRY: (JobState.FAILED, JobState.EXPIRED, JobState.CANCELLED),
        Act.PRIORITIZE: (JobState.QUEUED,),
    }
)
"""In which there is something to do."""

LOCK = text("""
SELECT id FROM jobs WHERE id = ANY(CAST(:ids AS uuid[])) ORDER BY id FOR UPDATE
""")

# In a separate statement: it must see replays of those who held the locks before, and which parents
# are gone.
RETRY = text(f"""
INSERT INTO jobs ({COPIED}, key_name)
SELECT {COPIES}, :key_name FROM jobs
WHERE jobs.id = ANY(CAST(:ids AS uuid[]))
    AND NOT EXISTS (SELECT FROM jobs AS replays WHERE replays.replay_of = jobs.id)
    AND {HAS_ITS_PARENTS}
ORDER BY jobs.created_at, jobs.id
""")  # noqa: S608 (constants of ours)

PRIORITIZE = text("""
-- Those that still wait, locked in order of id.
WITH locked AS (
    SELECT id FROM jobs
    WHERE id = ANY(CAST(:ids AS uuid[])) AND state = 'queued' AND priority <> :priority
    ORDER BY id FOR UPDATE
)
-- A message that was sent has the old priority: another one is due.
UPDATE jobs SET priority = :priority, sent_at = NULL, num_sends = 0
FROM locked WHERE jobs.id = locked.id AND jobs.state = 'queued'
""")


class BulkAct(msgspec.Struct, frozen=True, kw_only=True):
    """One act, and the jobs that it is for."""

    act: Act
    where: JobFilter
    priority: int | None = None
    """Of PRIORITIZE: the new one."""
    key_name: str | None = None
    """Of RETRY: the limits of this API key count."""


class BulkProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far an act has come: give it to the next page."""

    num_changed: int = 0
    has_more: bool = True
    began_at: datetime | None = None
    """Jobs that were created later are not meant."""
    end: PageEnd | None = None
    audit_id: int | None = None
    """Of its row in the audit log, once something is changed."""


def bulk_act(
    act: Act, where: JobFilter, *, priority: int | None = None, key_name: str | None = None
) -> BulkAct:
    """Raises Invalid for a priority or a state that the act does not know."""
    if where.state is not None and where.state not in STATES[act]:
        known = ", ".join(STATES[act])
        problem = f"nothing is left to {act} in a job that is {where.state}"
        raise Invalid("state", problem, f"Name one of: {known}; or none")
    if act is Act.PRIORITIZE and priority not in PRIORITIES:
        problem = f"{priority} is none of {PRIORITIES[0]} to {PRIORITIES[-1]}"
        raise Invalid("priority", problem, "0 is served first")
    return BulkAct(act=act, where=where, priority=priority, key_name=key_name)


def count(connection: Connection, act: BulkAct) -> int:
    """How many jobs the act would change now, up to MAX_COUNTED."""
    found = _matching(act).limit(MAX_COUNTED).subquery()
    return int(connection.scalar(select(func.count()).select_from(found)) or 0)


def next_page(connection: Connection, act: BulkAct, progress: BulkProgress) -> BulkProgress:
    """Does the act on the oldest PAGE_ROWS jobs behind `progress`, and notes it in the audit log;
    returns how far that is. Raises what a quota refuses."""
    began_at = progress.began_at or connection.scalar(select(func.now()))
    order = (jobs.c.created_at, jobs.c.id)
    page = _matching(act).where(jobs.c.created_at <= began_at).order_by(*order).limit(PAGE_ROWS)
    if (end := progress.end) is not None:
        page = page.where(tuple_(*order) > tuple_(end.at, end.job_id))
    rows = list(connection.execute(page))
    num_more = _change(connection, act, [row.id for row in rows])
    num_changed = progress.num_changed + num_more
    audit_id = progress.audit_id
    if num_more:
        details = {"priority": act.priority, "known": audit_id}
        audit_id = audit.note_jobs(connection, act.act, act.where, num_changed, **details)
    return BulkProgress(
        num_changed=num_changed,
        has_more=len(rows) == PAGE_ROWS,
        began_at=began_at,
        end=PageEnd(at=rows[-1].created_at, job_id=rows[-1].id) if rows else None,
        audit_id=audit_id,
    )


def _change(connection: Connection, act: BulkAct, ids: Sequence[UUID]) -> int:
    """Returns how many were changed: others may have been first with some."""
    if not ids:
        return 0
    if act.act is Act.CANCEL:
        states = request_cancel(connection, ids)
        return sum(state in (*STATES[Act.CANCEL], JobState.CANCELLED) for state in states.values())
    if act.act is Act.RETRY:
        connection.execute(LOCK, {"ids": ids})
        return connection.execute(RETRY, {"ids": ids, "key_name": act.key_name}).rowcount
    num_changed = connection.execute(PRIORITIZE, {"ids": ids, "priority": act.priority}).rowcount
    ring(connection, JOBS_CHANNEL)
    return num_changed


def _matching(act: BulkAct) -> Select[Any]:
    return select(jobs.c.id, jobs.c.created_at).where(*_is_open(act), *_is_meant(act.where))


def _is_open(act: BulkAct) -> list[ColumnElement[bool]]:
    """What holds until the act is done."""
    wanted = act.where.state
    if act.act is Act.RETRY:
        replays = jobs.alias()
        # A list of ids means just those jobs.
        others = (JobState.FAILED,) if act.where.ids is None else STATES[Act.RETRY]
        states = [wanted] if wanted else list(others)
        has_prompt = func.num_nonnulls(jobs.c.prompt, jobs.c.messages, jobs.c.prompt_ids) > 0
        rules = [has_prompt, ~exists().where(replays.c.replay_of == jobs.c.id)]
        rules.append(literal_column(HAS_ITS_PARENTS, Boolean))
    else:
        states = [wanted] if wanted else list(STATES[act.act])
        rules = [jobs.c.cancel_requested_at.is_(None)]
        if act.act is Act.PRIORITIZE:
            rules.append(jobs.c.priority != act.priority)
    return [jobs.c.state.in_(states), *rules]


def _is_meant(where: JobFilter) -> list[ColumnElement[bool]]:
    rules = []
    for column, value in (
        (jobs.c.tenant_id, where.tenant),
        (jobs.c.model, where.model),
        (jobs.c.error["code"].astext, where.error_code),
    ):
        if value is not None:
            rules.append(column == value)
    if where.ids is not None:
        rules.append(is_any(jobs.c.id, where.ids))
    if where.created_after is not None:
        rules.append(jobs.c.created_at >= where.created_after)
    if where.created_before is not None:
        rules.append(jobs.c.created_at < where.created_before)
    if where.metadata is not None:
        rules.append(jobs.c.metadata.contains(where.metadata))
    if where.kind is not None:
        rules.append(_is_of(where.kind))
    if where.batch_id is not None:
        rules.append(jobs.c.id == any_(_jobs_of(where.batch_id)))
    return rules


def _jobs_of(batch_id: UUID) -> ColumnElement[Any]:
    """The ids of a batch's jobs. As an array, by which Postgres looks jobs up: of a subquery it
    would ask for each job of the table whether it is there."""
    lines = batch_lines.c
    choices = jobs.alias()
    firsts = select(lines.job_id).where(lines.batch_id == batch_id, lines.job_id.is_not(None))
    others = (
        select(choices.c.id)
        .join(batch_lines, choices.c.choice_of == lines.job_id)
        .where(lines.batch_id == batch_id)
    )
    return func.array(firsts.union_all(others).scalar_subquery())


def _is_of(kind: JobKind) -> ColumnElement[bool]:
    is_chat = jobs.c.messages.is_not(None)
    is_decision: ColumnElement[bool] = jobs.c.params.has_key("question")
    if kind is JobKind.DECISION:
        return is_decision
    return ~is_decision & (is_chat if kind is JobKind.CHAT else ~is_chat)
