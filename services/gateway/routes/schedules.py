"""The door to schedules: jobs that relays submit at times of cron expressions."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from services.gateway.context import GatewayDep
from services.gateway.errors import json_response
from services.gateway.guard import CancelCaller, ReadCaller, SubmitCaller
from services.gateway.http.query import described, query
from services.gateway.request_body import read_body
from services.gateway.schedules.bodies import (
    SCHEDULE_ID,
    ScheduleDeleted,
    ScheduleDocument,
    ScheduleList,
    ScheduleQuery,
    ScheduleRequest,
    ScheduleUpdate,
)
from services.gateway.schemas import GUARDED, answer, errors, json_body, parameters
from shardline.store.schedules import schedule_rows
from shardline.store.schedules.schedule_rows import SCHEDULE, NewSchedule, schedule_id_of

ROUTE = "/v1/schedules"
ONE = f"{ROUTE}/{{schedule_id}}"

router = APIRouter(tags=["jobs"], default_response_class=Response, responses=errors(*GUARDED, 400))

ScheduleIdPath = Annotated[str, Path(json_schema_extra={"pattern": SCHEDULE_ID})]


@router.post(
    ROUTE,
    openapi_extra=json_body(ScheduleRequest),
    responses={200: answer("The schedule", ScheduleDocument), **errors(408, 409, 413, 415)},
)
async def create_schedule(request: Request, gateway: GatewayDep, caller: SubmitCaller) -> Response:
    """Make a schedule: from now on each of its times is a job, with its name in the metadata."""
    asked = await read_body(gateway, request, ScheduleRequest)
    new = NewSchedule(
        name=asked.name,
        cron=asked.cron,
        time_zone=asked.time_zone,
        request=asked.request,
        catch_up=asked.catch_up,
        paused=asked.paused,
        tenant=caller.tenant,
        key_name=caller.key_name,
    )
    work = partial(schedule_rows.create, new=new)
    made = await gateway.client.ask(work, key_id=caller.key_id)
    return json_response(ScheduleDocument.of(made))


@router.get(
    ROUTE,
    openapi_extra=parameters(query=described(ScheduleQuery)),
    responses={200: answer("A page", ScheduleList)},
)
async def list_schedules(request: Request, gateway: GatewayDep, caller: ReadCaller) -> Response:
    """List the tenant's schedules without their requests, newest first."""
    asked = query(request, ScheduleQuery)
    page = partial(
        schedule_rows.list_schedules,
        tenant=caller.tenant,
        limit=asked.limit,
        after=None if asked.after is None else schedule_id_of(asked.after, "after"),
    )
    found, has_more = await gateway.client.ask(page)
    data = [ScheduleDocument.of(row) for row in found]
    return json_response(
        ScheduleList(
            data=data,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
            has_more=has_more,
        )
    )


@router.get(ONE, responses={200: answer("The schedule", ScheduleDocument), **errors(404)})
async def get_schedule(
    schedule_id: ScheduleIdPath, gateway: GatewayDep, caller: ReadCaller
) -> Response:
    """A schedule, when it fires next, and what became of its last time."""
    wanted = partial(
        schedule_rows.get, schedule_id=schedule_id_of(schedule_id), tenant=caller.tenant
    )
    return json_response(ScheduleDocument.of(await gateway.client.ask(wanted)))


@router.post(
    ONE,
    openapi_extra=json_body(ScheduleUpdate),
    responses={200: answer("As it is now", ScheduleDocument), **errors(404, 408, 413, 415)},
)
async def update_schedule(
    schedule_id: ScheduleIdPath, request: Request, gateway: GatewayDep, caller: SubmitCaller
) -> Response:
    """Let a schedule fire no more, or again from now on."""
    asked = await read_body(gateway, request, ScheduleUpdate)
    work = partial(
        schedule_rows.set_paused,
        schedule_id=schedule_id_of(schedule_id),
        paused=asked.paused,
        tenant=caller.tenant,
    )
    changed = await gateway.client.ask(work, key_id=caller.key_id)
    return json_response(ScheduleDocument.of(changed))


@router.delete(ONE, responses={200: answer("Deleted", ScheduleDeleted), **errors(404)})
async def delete_schedule(
    schedule_id: ScheduleIdPath, gateway: GatewayDep, caller: CancelCaller
) -> Response:
    """Delete a schedule; its jobs go on."""
    found = schedule_id_of(schedule_id)
    work = partial(schedule_rows.delete, schedule_id=found, tenant=caller.tenant)
    await gateway.client.ask(work, key_id=caller.key_id)
    return json_response(ScheduleDeleted(id=f"{SCHEDULE}{found}"))
