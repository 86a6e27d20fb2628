"""The door of operators to what is paused: models, tenants, batches and tags of the whole
installation."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from services.gateway.context import GatewayDep
from services.gateway.errors import json_response
from services.gateway.guard import AdminCaller
from services.gateway.request_body import read_body
from services.gateway.schedules.bodies import PauseDocument, PauseEnded, PauseList, PauseRequest
from services.gateway.schemas import GUARDED, answer, errors, json_body
from shardline.contract.schedules.schedule_tables import PauseKind
from shardline.store.schedules import pauses
from shardline.store.schedules.pauses import kind_of

ROUTE = "/v1/pauses"

KindPath = Annotated[str, Path(json_schema_extra={"enum": list(PauseKind)})]

router = APIRouter(
    tags=["operating"], default_response_class=Response, responses=errors(*GUARDED, 400)
)


@router.post(
    ROUTE,
    openapi_extra=json_body(PauseRequest),
    responses={200: answer("It is paused", PauseDocument), **errors(408, 409, 413, 415)},
)
async def pause(request: Request, gateway: GatewayDep, caller: AdminCaller) -> Response:
    """Let jobs of a model, tenant, batch or tag wait: those that run go on, deadlines too."""
    asked = await read_body(gateway, request, PauseRequest)
    work = partial(pauses.pause, kind=asked.kind, target=asked.target, reason=asked.reason)
    return json_response(PauseDocument.of(await gateway.client.ask(work, key_id=caller.key_id)))


@router.get(ROUTE, responses={200: answer("All", PauseList)})
async def list_pauses(gateway: GatewayDep, _caller: AdminCaller) -> Response:
    """List what is paused, the oldest pause first."""
    found = await gateway.client.ask(pauses.list_pauses)
    return json_response(PauseList(data=[PauseDocument.of(one) for one in found]))


@router.delete(
    f"{ROUTE}/{{kind}}/{{target:path}}",
    responses={200: answer("It is resumed", PauseEnded), **errors(404)},
)
async def resume(kind: KindPath, target: str, gateway: GatewayDep, caller: AdminCaller) -> Response:
    """Let paused jobs run again, the oldest first."""
    known = kind_of(kind)
    work = partial(pauses.resume, kind=known, target=target)
    await gateway.client.ask(work, key_id=caller.key_id)
    return json_response(PauseEnded(kind=known, target=target))
