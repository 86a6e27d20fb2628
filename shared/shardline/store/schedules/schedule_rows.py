"""Schedules as rows: made, listed, paused, deleted. Fires none: relays do.

`tenant` None is anybody's: of commands, which may read the table anyway.
Locks: the tenant's row to count its schedules; else one row of `schedules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

import msgspec
from sqlalchemy import Connection, RowMapping, text

from shardline.base.errors import Conflict, Invalid, NotFound
from shardline.contract.ids import parse_id
from shardline.contract.job import DEFAULT_TENANT, JobRequest
from shardline.contract.request_parsing import check_metadata, parse_request
from shardline.contract.schedules.cron import next_time
from shardline.contract.schedules.schedule_tables import CatchUp
from shardline.store.connection.encoding import dump
from shardline.store.inserts import encode_request
from shardline.store.tenants.quotas import add_tenant, check_name

MAX_SCHEDULES = 1_000
"""Of a tenant."""

MAX_REQUEST_BYTES = 256 << 10
"""As JSON. It is checked as it comes, and read each time that it fires."""

SCHEDULE = "sched_"
"""Before an id, as clients name it."""

MARK = "schedule"
"""The field of a job's metadata that names its schedule: jobs are listed and paused by it."""

OF_EACH_JOB = ("id", "idempotency_key", "tenant", "traceparent")
"""Fields of a request that a schedule's may not have: each of its jobs has its own."""

COLUMNS = """id, tenant_id AS tenant, name, cron, time_zone, catch_up, paused, created_at, next_at,
    last_at, last_job_id, last_error"""

# FOR NO KEY UPDATE: jobs of the tenant are inserted meanwhile.
LOCK_TENANT = text("SELECT now() FROM tenants WHERE id = :tenant FOR NO KEY UPDATE")
COUNT = text("SELECT count(*) FROM schedules WHERE tenant_id = :tenant")
INSERT = text(f"""
INSERT INTO schedules (id, tenant_id, name, cron, time_zone, request, catch_up, paused, key_name,
    next_at)
VALUES (:id, :tenant, :name, :cron, :time_zone, CAST(:request AS json), :catch_up, :paused,
    :key_name, :next_at)
ON CONFLICT DO NOTHING RETURNING {COLUMNS}, request
""")  # noqa: S608 (a constant of ours)
LIST = f"""
SELECT {COLUMNS}, NULL AS request FROM schedules
WHERE tenant_id = coalesce(:tenant, tenant_id) {{rules}}
ORDER BY created_at DESC, id DESC LIMIT :limit
"""  # noqa: S608 (a constant of ours)
BEHIND = "AND (created_at, id) < (SELECT created_at, id FROM schedules WHERE id = :after)"
GET = text(f"""
SELECT {COLUMNS}, request FROM schedules
WHERE id = :id AND tenant_id = coalesce(:tenant, tenant_id)
""")  # noqa: S608 (a constant of ours)
NAMED = text("SELECT id FROM schedules WHERE tenant_id = :tenant AND name = :name")
# Times missed during a pause do not fire: a trigger restarts the schedule.
SET_PAUSED = text(f"""
UPDATE schedules SET paused = :paused,
    last_error = CASE WHEN paused AND NOT :paused THEN NULL ELSE last_error END
WHERE id = :id AND tenant_id = coalesce(:tenant, tenant_id) RETURNING {COLUMNS}, request
""")  # noqa: S608 (a constant of ours)
DELETE = text("""
DELETE FROM schedules WHERE id = :id AND tenant_id = coalesce(:tenant, tenant_id) RETURNING id
""")


class NewSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """What a schedule is made of."""

    name: str
    cron: str
    request: Mapping[str, Any]
    """Of its jobs, as any door takes one."""
    time_zone: str = "UTC"
    catch_up: CatchUp = CatchUp.ONCE
    paused: bool = False
    tenant: str = DEFAULT_TENANT
    key_name: str | None = None
    """Of the API key that it came with."""


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule. `request` is None in lists."""

    id: UUID
    tenant: str
    name: str
    cron: str
    time_zone: str
    request: dict[str, Any] | None
    catch_up: CatchUp
    paused: bool
    created_at: datetime
    next_at: datetime | None
    """None: it is paused, or relays have yet to look at it."""
    last_at: datetime | None
    last_job_id: UUID | None
    last_error: dict[str, Any] | None


def create(connection: Connection, new: NewSchedule) -> Schedule:
    """Makes a schedule; a tenant that there is not is made too. Raises Invalid, and Conflict where
    the tenant has MAX_SCHEDULES, or one of this name."""
    check_name("name", new.name)
    request = _encoded(new.request)
    job_request(new.request, name=new.name, tenant=new.tenant)
    add_tenant(connection, new.tenant)
    now = connection.scalar(LOCK_TENANT, {"tenant": new.tenant})
    values = {
        **msgspec.structs.asdict(new),
        "id": uuid4(),
        "request": request,
        "catch_up": str(new.catch_up),
        "next_at": next_time(new.cron, new.time_zone, now),
    }
    if connection.scalar(COUNT, values) >= MAX_SCHEDULES:
        problem = f"the tenant has {MAX_SCHEDULES} schedules, which is the limit"
        raise Conflict(f"{problem}; delete one")
    row = connection.execute(INSERT, values).mappings().first()
    if row is None:
        raise Conflict(f"the tenant has a schedule {new.name!r}; delete it, or use another name")
    return _schedule(row)


def job_request(request: object, *, name: str, tenant: str) -> JobRequest:
    """Returns the request of a schedule's jobs, with its mark and without an id. Raises Invalid,
    naming a field within `request`."""
    if not isinstance(request, Mapping):
        raise Invalid("request", "it is no object", "Write a job's fields")
    try:
        _check_is_of_all(request)
        parsed = parse_request(request)
        marked = {**parsed.metadata, MARK: name}
        check_metadata(marked)
        made = msgspec.structs.replace(parsed, metadata=marked, tenant=tenant)
        encode_request(made)
    except Invalid as error:
        raise Invalid(f"request.{error.field}", error.problem, error.remedy) from error
    return made


def list_schedules(
    connection: Connection, *, tenant: str | None, limit: int, after: UUID | None = None
) -> tuple[list[Schedule], bool]:
    """Returns a page behind `after`, newest first, and whether there are more. Raises Invalid for
    an `after` that is not there."""
    if after is not None:
        try:
            get(connection, after, tenant=tenant)
        except NotFound as error:
            remedy = "List from the start"
            raise Invalid("after", f"there is no schedule {SCHEDULE}{after}", remedy) from error
    query = text(LIST.format(rules="" if after is None else BEHIND))
    values = {"tenant": tenant, "limit": limit + 1, "after": after}
    found = [_schedule(row) for row in connection.execute(query, values).mappings()]
    return found[:limit], len(found) > limit


def get(connection: Connection, schedule_id: UUID, *, tenant: str | None) -> Schedule:
    """Returns a schedule with its request. Raises NotFound."""
    row = connection.execute(GET, {"id": schedule_id, "tenant": tenant}).mappings().first()
    if row is None:
        raise _missing(schedule_id)
    return _schedule(row)


def id_of(connection: Connection, tenant: str, name: str) -> UUID:
    """Returns the id of the tenant's schedule of this name. Raises NotFound."""
    found = connection.scalar(NAMED, {"tenant": tenant, "name": name})
    if found is None:
        raise NotFound(f"the tenant {tenant!r} has no schedule {name!r}")
    return UUID(str(found))


def set_paused(
    connection: Connection, schedule_id: UUID, *, paused: bool, tenant: str | None
) -> Schedule:
    """Lets a schedule fire no more, or again from now on: nothing of the pause is caught up. Raises
    NotFound, Invalid."""
    values = {"id": schedule_id, "tenant": tenant, "paused": paused}
    row = connection.execute(SET_PAUSED, values).mappings().first()
    if row is None:
        raise _missing(schedule_id)
    return _schedule(row)


def delete(connection: Connection, schedule_id: UUID, *, tenant: str | None) -> None:
    """Deletes a schedule; its jobs go on. Raises NotFound."""
    if connection.scalar(DELETE, {"id": schedule_id, "tenant": tenant}) is None:
        raise _missing(schedule_id)


def schedule_id_of(name: str, field: str = "schedule_id") -> UUID:
    """Reads an id as clients send it. Raises Invalid, naming `field`."""
    return parse_id(name.removeprefix(SCHEDULE), field)


def _missing(schedule_id: UUID) -> NotFound:
    return NotFound(f"no schedule has the id {SCHEDULE}{schedule_id}")


def _encoded(request: Mapping[str, Any]) -> str:
    try:
        encoded = dump(request)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        remedy = "See docs/jobs.md for fields and limits"
        raise Invalid("request", f"it cannot be stored: {error}", remedy) from error
    if len(encoded) > MAX_REQUEST_BYTES:
        problem = f"it has {len(encoded):,} bytes, over the limit of {MAX_REQUEST_BYTES:,}"
        raise Invalid("request", problem, "Send a shorter one")
    return encoded


def _check_is_of_all(request: Mapping[str, Any]) -> None:
    for field in OF_EACH_JOB:
        if request.get(field) is not None:
            raise Invalid(field, "each job of a schedule has its own", "Leave it out")


def _schedule(row: RowMapping) -> Schedule:
    return Schedule(**{**row, "catch_up": CatchUp(row["catch_up"])})
