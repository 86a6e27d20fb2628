"""Fires schedules that are due: the job and the next time are one transaction, so that of several
relays, and of kills between, each time has one job.

Postgres's clock alone decides what is due: it is one for all relays, and the clock of deadlines. A
job's id is made of its schedule and its time: a time that comes again has its job already.
Locks: one row of `schedules` with SKIP LOCKED, then what an insert locks.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Literal
from uuid import UUID

import msgspec
from sqlalchemy import Connection, Row, text
from sqlalchemy.exc import DataError, IntegrityError, OperationalError

from shardline.base.errors import Busy, Conflict, Invalid, LimitExceeded
from shardline.contract.ids import derived_id
from shardline.contract.schedules.cron import next_time
from shardline.contract.schedules.schedule_tables import CatchUp
from shardline.store.connection.encoding import dump, storable
from shardline.store.inserts import encode_request, insert_all
from shardline.store.schedules.schedule_rows import job_request
from shardline.store.tenants.tenant_doors import is_locked_out, wait_briefly

LATE = timedelta(minutes=1)
"""A time that has not fired after this delay was missed."""

ROW_ERRORS = (DataError, IntegrityError, TypeError, ValueError, RecursionError, OverflowError)
"""What a row that SQL wrote can cause beyond what validation raises."""

TAKE_DUE = text("""
SELECT id, tenant_id, name, cron, time_zone, CAST(request AS text) AS request, catch_up, key_name,
    fires_after, next_at, now() AS now,
    -- Of all keys of this name: a rotation has left an old one.
    (SELECT bool_and(revoked_at IS NOT NULL) FROM api_keys
        WHERE api_keys.name = key_name AND api_keys.tenant_id = schedules.tenant_id) AS is_revoked
FROM schedules WHERE NOT paused AND (next_at IS NULL OR next_at <= now())
    AND tenant_id <> ALL(CAST(:held_up AS text[]))
ORDER BY next_at NULLS FIRST LIMIT 1 FOR UPDATE SKIP LOCKED
""")
FIND = text("UPDATE schedules SET next_at = :next_at WHERE id = :id")
ADVANCE = text("""
UPDATE schedules SET fires_after = :fired_at, next_at = :next_at, last_at = :fired_at,
    last_job_id = coalesce(CAST(:job_id AS uuid), last_job_id),
    last_error = CAST(:error AS jsonb)
WHERE id = :id
""")
GIVE_UP = text("""
UPDATE schedules SET paused = true, last_error = CAST(:error AS jsonb) WHERE id = :id
""")

FiringOutcome = Literal["fired", "found", "missed", "refused", "invalid", "held_up"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Firing:
    """What became of a schedule that was due. `refused`: its time has no job, the next one may;
    `invalid`: it is paused, until somebody corrects it; `found`: its next time is known now;
    `held_up`: another transaction has what its job needs, and it is still due."""

    schedule_id: UUID
    tenant: str
    name: str
    outcome: FiringOutcome
    error: str | None = None


def fire_next(connection: Connection, *, held_up: Collection[str] = ()) -> Firing | None:
    """Sees to one schedule that is due; None where there is none, or others do. Those of tenants
    that are `held_up` are passed over: they share their locks."""
    row = connection.execute(TAKE_DUE, {"held_up": list(held_up)}).first()
    if row is None:
        return None
    wait_briefly(connection)
    outcome: FiringOutcome
    error = None
    try:
        # The times between that one and now are caught up with its job.
        behind = row.fires_after if row.next_at is None else max(row.next_at, row.now)
        next_at = next_time(row.cron, row.time_zone, behind)
        with connection.begin_nested():
            outcome = _fire(connection, row, next_at)
    except (LimitExceeded, Conflict, Busy) as problem:
        outcome, error = "refused", _error(problem)
        _advance(connection, row, next_at, error=error)
    except (Invalid, *ROW_ERRORS) as problem:
        outcome, error = "invalid", _error(problem)
        connection.execute(GIVE_UP, {"id": row.id, "error": dump(error)})
    except OperationalError as problem:
        if not is_locked_out(problem):
            raise
        outcome, error = "held_up", _error(problem)
    return Firing(
        schedule_id=row.id,
        tenant=row.tenant_id,
        name=row.name,
        outcome=outcome,
        error=None if error is None else error["problem"],
    )


def _fire(connection: Connection, row: Row[Any], next_at: datetime) -> FiringOutcome:
    if row.is_revoked:
        problem = f"the API key {row.key_name!r}, which made the schedule, was revoked"
        raise Invalid("key_name", problem, "Delete the schedule, and make it with a valid key")
    if row.next_at is None:
        connection.execute(FIND, {"id": row.id, "next_at": next_at})
        return "found"
    if row.catch_up == CatchUp.NONE and row.now - row.next_at > LATE:
        missed = {"code": "missed", "problem": "no relay fired it at that time"}
        _advance(connection, row, next_at, error=missed)
        return "missed"
    wanted = job_request(json.loads(row.request), name=row.name, tenant=row.tenant_id)
    job_id = derived_id(f"{row.id} {row.next_at.timestamp()}")
    encoded = encode_request(msgspec.structs.replace(wanted, id=job_id))
    insert_all(connection, [replace(encoded, key_name=row.key_name)])
    _advance(connection, row, next_at, job_id=job_id)
    return "fired"


def _advance(
    connection: Connection,
    row: Row[Any],
    next_at: datetime,
    *,
    job_id: UUID | None = None,
    error: dict[str, Any] | None = None,
) -> None:
    values = {
        "id": row.id,
        "fired_at": row.next_at,
        "next_at": next_at,
        "job_id": job_id,
        "error": None if error is None else dump({**error, "at": row.next_at.isoformat()}),
    }
    connection.execute(ADVANCE, values)


def _error(problem: Exception) -> dict[str, Any]:
    """Returns it as the row keeps it."""
    if isinstance(problem, Invalid):
        return {name: storable(str(value)) for name, value in problem.as_dict().items()}
    code = "invalid_request"
    if isinstance(problem, Conflict | Busy):
        code = "conflict" if isinstance(problem, Conflict) else "unavailable"
    lines = str(getattr(problem, "orig", None) or problem).splitlines()
    return {"code": code, "problem": storable(lines[0] if lines else type(problem).__name__)}
