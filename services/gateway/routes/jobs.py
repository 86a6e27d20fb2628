"""The native door: jobs that outlive their caller, and event streams that can be joined again."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Path, Request, Response
from msgspec import Meta, Struct

from services.gateway import bodies
from services.gateway.context import GatewayDep
from services.gateway.errors import json_response
from services.gateway.guard import CancelCaller, ReadCaller, SubmitCaller
from services.gateway.http.query import described, query
from services.gateway.http.sse import EventStream
from services.gateway.job_events import job_events
from services.gateway.schemas import (
    GUARDED,
    REQUEST_ID,
    TAKING,
    answer,
    body,
    errors,
    events,
    parameters,
)
from services.gateway.submit import submit
from shardline.base.errors import Invalid, NotFound
from shardline.contract.ids import parse_id
from shardline.contract.job import JobRequest, JobState
from shardline.contract.request_parsing import parse_request
from shardline.store.listing import PageEnd
from shardline.streams import Place
from shardline.streams.cursor import PLACE

router = APIRouter(tags=["jobs"], default_response_class=Response, responses=errors(*GUARDED, 400))

NAMED = ("Location", REQUEST_ID)
JOB_ID = r"^(chatcmpl-|cmpl-|msg_|resp_)?[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"
JobIdPath = Annotated[str, Path(json_schema_extra={"pattern": JOB_ID})]
"""Described only: `parse_id` reports better what is wrong."""

JOB_EVENTS: dict[str, type[Struct]] = {
    "delta": bodies.JobDelta,
    "end": bodies.JobDocument,
    "interrupted": bodies.StreamInterruption,
}
A_PLACE = {"type": "string", "pattern": f"^{PLACE.pattern}$"}
FOLLOWED = "`delta`, then `end` or `interrupted`"
PageEndText = Annotated[str, Meta(description="`next` of the page before, or its last id")]


class JobQuery(Struct, frozen=True, kw_only=True):
    """The query of `GET /v1/jobs`."""

    state: JobState | None = None
    model: str | None = None
    limit: Annotated[int, Meta(ge=1, le=200)] = 100
    after: PageEndText | None = None


class EventQuery(Struct, frozen=True, kw_only=True):
    """The query of `GET /v1/jobs/{job_id}/events`."""

    after: Annotated[str, Meta(extra_json_schema=A_PLACE)] | None = None


@router.post(
    "/v1/jobs",
    status_code=202,
    openapi_extra=body(JobRequest),
    responses={
        200: answer("A repeat, with its present state", bodies.JobAccepted, headers=NAMED),
        202: answer("Stored", bodies.JobAccepted, headers=NAMED),
        **errors(*TAKING),
    },
)
async def create_job(request: Request, gateway: GatewayDep, caller: SubmitCaller) -> Response:
    """Store a job and return at once: 202, or 200 when a request with the same id or key was there
    first."""
    accepted = await submit(gateway, request, caller, parse_request)
    state = (
        JobState.QUEUED if accepted.is_new else (await gateway.client.get(accepted.job_id)).state
    )
    document = bodies.JobAccepted(id=accepted.job_id, model=accepted.model.address, state=state)
    headers = {"Location": f"/v1/jobs/{accepted.job_id}", "x-request-id": str(accepted.job_id)}
    return json_response(document, status=202 if accepted.is_new else 200, headers=headers)


@router.get(
    "/v1/jobs",
    openapi_extra=parameters(query=described(JobQuery)),
    responses={200: answer("A page", bodies.JobList)},
)
async def list_jobs(request: Request, gateway: GatewayDep, caller: ReadCaller) -> Response:
    """List the tenant's jobs, newest first, without their bodies."""
    asked = query(request, JobQuery)
    after = asked.after
    found = await gateway.client.list(
        state=asked.state,
        model=asked.model,
        tenant=caller.tenant,
        limit=asked.limit,
        after=None if after is None else PageEnd.parse(after) or _job_id(after, "after"),
    )
    is_full = len(found) == asked.limit
    page = bodies.JobList(
        data=[bodies.JobListed.of(job) for job in found],
        has_more=is_full,
        next=str(PageEnd.of(found)) if is_full else None,
    )
    return json_response(page)


@router.get(
    "/v1/jobs/{job_id}", responses={200: answer("The job", bodies.JobDocument), **errors(404)}
)
async def get_job(job_id: JobIdPath, gateway: GatewayDep, caller: ReadCaller) -> Response:
    """The job, with its result once it has one."""
    job = await gateway.client.get(_job_id(job_id), tenant=caller.tenant)
    return json_response(bodies.JobDocument.of(job))


@router.delete(
    "/v1/jobs/{job_id}",
    responses={200: answer("Its state afterwards", bodies.JobCancelling), **errors(404)},
)
async def cancel_job(job_id: JobIdPath, gateway: GatewayDep, caller: CancelCaller) -> Response:
    """Cancel a job. A running one becomes `cancelled` a little later, with its tokens; an ended one
    stays as it is."""
    wanted = _job_id(job_id)
    state = (await gateway.client.cancel(wanted, tenant=caller.tenant)).get(wanted)
    if state is None:
        raise NotFound(f"no job has the id {wanted}")
    requested = state in (JobState.QUEUED, JobState.RUNNING, JobState.CANCELLED)
    return json_response(bodies.JobCancelling(id=wanted, state=state, cancel_requested=requested))


@router.get(
    "/v1/jobs/{job_id}/events",
    openapi_extra=parameters(query=described(EventQuery), header={"Last-Event-ID": A_PLACE}),
    responses={
        200: answer(FOLLOWED, events(JOB_EVENTS, A_PLACE), headers=(REQUEST_ID,)),
        **errors(404),
    },
)
async def follow_job(
    job_id: JobIdPath, request: Request, gateway: GatewayDep, caller: ReadCaller
) -> Response:
    """Stream a job's tokens as server-sent events. `id:` is the number of tokens so far and a
    checksum of them: send it back as Last-Event-ID, or as `?after=`, to continue where a connection
    was cut, without a gap or a repeat."""
    job = await gateway.client.get(_job_id(job_id), tenant=caller.tenant)
    text = request.headers.get("last-event-id") or query(request, EventQuery).after or "0"
    after = Place.parse(text)
    if after is None:
        raise Invalid(
            "after",
            f"{text[:32]!r} is not a position in a stream",
            "Send the id of its last event, or leave it out",
        )
    return EventStream(job_events(gateway, job, after), headers={"x-request-id": str(job.id)})


def _job_id(text: str, field: str = "id") -> UUID:
    """Completions and messages carry their job's id behind a prefix."""
    for prefix in ("chatcmpl-", "cmpl-", "msg_", "resp_"):
        text = text.removeprefix(prefix)
    return parse_id(text, field)
