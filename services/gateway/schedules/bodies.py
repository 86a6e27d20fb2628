"""The bodies of the routes for pauses and schedules. The API's description is made from these
types."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shardline.contract.schedules.schedule_tables import (
    MAX_CRON_CHARS,
    MAX_NAME_CHARS,
    MAX_REASON_CHARS,
    MAX_TARGET_CHARS,
    CatchUp,
    PauseKind,
)
from shardline.store.schedules.pauses import Pause
from shardline.store.schedules.schedule_rows import SCHEDULE, Schedule

SCHEDULE_ID = f"^({SCHEDULE})?[0-9a-f]{{8}}(-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}}$"
MAX_PAGE = 100

Target = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_TARGET_CHARS,
        description="A model, a tenant, a batch's id, or `key=value` of jobs' metadata",
    ),
]


class PauseRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/pauses`."""

    kind: PauseKind
    target: Target
    reason: Annotated[str, Meta(max_length=MAX_REASON_CHARS)] | None = None


class PauseDocument(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="pause"):
    """A pause, which keeps the jobs of its target waiting."""

    kind: PauseKind
    target: str
    reason: str | None
    created_at: int

    @classmethod
    def of(cls, row: Pause) -> PauseDocument:
        """The row, as it is answered."""
        created_at = int(row.created_at.timestamp())
        return cls(kind=row.kind, target=row.target, reason=row.reason, created_at=created_at)


class PauseList(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="list"):
    """All that is paused."""

    data: list[PauseDocument]


class PauseEnded(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="pause.deleted"
):
    """The answer to a resumption."""

    kind: PauseKind
    target: str
    deleted: bool = True


class ScheduleRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/schedules`."""

    name: Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
    cron: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=MAX_CRON_CHARS,
            description="Minute, hour, day of month, month, day of week: `0 7 * * MON-FRI`",
        ),
    ]
    request: Annotated[dict[str, Any], Meta(description="The body of `POST /v1/jobs` for each job")]
    time_zone: Annotated[
        str, Meta(min_length=1, max_length=MAX_NAME_CHARS, description="As IANA names it")
    ] = "UTC"
    catch_up: Annotated[
        CatchUp, Meta(description="What times become that no relay was there for: one job, or none")
    ] = CatchUp.ONCE
    paused: bool = False


class ScheduleUpdate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What becomes another."""

    paused: bool


class ScheduleDocument(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="schedule"
):
    """A schedule. `request` is null in lists, `next_at` while it is paused."""

    id: str
    name: str
    cron: str
    time_zone: str
    request: dict[str, Any] | None
    catch_up: CatchUp
    paused: bool
    created_at: int
    next_at: int | None
    last_at: int | None
    last_job_id: str | None
    last_error: dict[str, Any] | None

    @classmethod
    def of(cls, row: Schedule) -> ScheduleDocument:
        """The row, as it is answered."""
        return cls(
            id=f"{SCHEDULE}{row.id}",
            name=row.name,
            cron=row.cron,
            time_zone=row.time_zone,
            request=row.request,
            catch_up=row.catch_up,
            paused=row.paused,
            created_at=int(row.created_at.timestamp()),
            next_at=None if row.next_at is None else int(row.next_at.timestamp()),
            last_at=None if row.last_at is None else int(row.last_at.timestamp()),
            last_job_id=None if row.last_job_id is None else str(row.last_job_id),
            last_error=row.last_error,
        )


class ScheduleList(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="list"):
    """One page, newest first; `last_id` is `after` of the next one."""

    data: list[ScheduleDocument]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ScheduleDeleted(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="schedule.deleted"
):
    """The answer to a deletion."""

    id: str
    deleted: bool = True


class ScheduleQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query of `GET /v1/schedules`."""

    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 20
    after: Annotated[str, Meta(description="`last_id` of the page before")] | None = None
