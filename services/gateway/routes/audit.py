"""The door of operators to the audit log: administrative acts of the whole installation."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta

from services.gateway.context import GatewayDep
from services.gateway.errors import json_response
from services.gateway.guard import AdminCaller
from services.gateway.http.query import described, query
from services.gateway.schemas import GUARDED, answer, errors, parameters
from shardline.store import audit

router = APIRouter(
    tags=["operating"], default_response_class=Response, responses=errors(*GUARDED, 400)
)


class ActsQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query of `GET /v1/audit`."""

    limit: Annotated[int, Meta(ge=1, le=audit.MAX_LISTED)] = 100
    after: Annotated[int, Meta(ge=1, le=999_999_999_999)] | None = None
    """The `last_id` of the page before."""
    since: Annotated[int, Meta(ge=0, le=99_999_999_999, description="Seconds since 1970")] = 0
    actor: str | None = None
    act: str | None = None


class ActDocument(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="act"):
    """An administrative act. `change` names changed secrets, URLs and requests without values."""

    id: int
    at: int
    actor: str
    role: str
    tenant: str | None
    act: str
    object_kind: str
    object_id: str
    change: dict[str, Any]


class ActList(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="list"):
    """One page, newest first; `last_id` is `after` of the next one."""

    data: list[ActDocument]
    last_id: int | None
    has_more: bool


@router.get(
    "/v1/audit",
    openapi_extra=parameters(query=described(ActsQuery)),
    responses={200: answer("A page", ActList)},
)
async def list_acts(request: Request, gateway: GatewayDep, _caller: AdminCaller) -> Response:
    """List administrative acts: on keys, tenants, pauses, schedules, webhooks, models, and on many
    jobs at once."""
    asked = query(request, ActsQuery)
    since = datetime.fromtimestamp(asked.since, UTC) if asked.since else None
    wanted = audit.AuditQuery(since=since, actor=asked.actor, act=asked.act, after=asked.after)
    work = partial(audit.list_acts, asked=wanted, limit=asked.limit)
    found, has_more = await gateway.client.ask(work)
    data = [
        ActDocument(**{**msgspec.structs.asdict(row), "at": int(row.at.timestamp())})
        for row in found
    ]
    return json_response(
        ActList(data=data, last_id=data[-1].id if data else None, has_more=has_more)
    )
