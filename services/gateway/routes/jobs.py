"""The native door: jobs that outlive their caller, and event streams that can be joined again."""

from __future__ import annotations

from uuid import UUID

from fastapi import APIRouter, Request, Response

from services.gateway.answers import job_document, summary_document
from services.gateway.door import accept, native_request
from services.gateway.errors import json_response
from services.gateway.following import job_events
from services.gateway.guard import Canceller, Reader, Submitter
from services.gateway.schemas import body
from services.gateway.state import Here
from services.gateway.stream import EventStream
from shardline.errors import Invalid, NotFound
from shardline.ids import parse_id
from shardline.job import JobState
from shardline.streams import Place

router = APIRouter(tags=["jobs"])

MAX_LISTED = 200


@router.post("/v1/jobs", status_code=202, openapi_extra=body("JobRequest"))
async def create_job(request: Request, gateway: Here, caller: Submitter) -> Response:
    """Store a job and return at once: 202, or 200 when a request with the same id or key was there first."""
    accepted = await accept(gateway, request, caller, native_request)
    state = JobState.QUEUED if accepted.is_new else (await gateway.client.get(accepted.job_id)).state
    document = {"id": accepted.job_id, "object": "job", "model": accepted.model.name, "state": state}
    headers = {"Location": f"/v1/jobs/{accepted.job_id}", "x-request-id": str(accepted.job_id)}
    return json_response(document, status=202 if accepted.is_new else 200, headers=headers)


@router.get("/v1/jobs")
async def list_jobs(request: Request, gateway: Here, caller: Reader) -> Response:
    """The tenant's, newest first, without their bodies. `state`, `model`, `limit`, and `after`: the last id of the page
    before."""
    query = request.query_params
    limit = _number("limit", query.get("limit", "100"), minimum=1, maximum=MAX_LISTED)
    after = query.get("after")
    found = await gateway.client.list(
        state=_state(query.get("state")),
        model=query.get("model"),
        tenant=caller.tenant,
        limit=limit,
        after=None if after is None else _job_id(after, "after"),
    )
    return json_response(
        {"object": "list", "data": [summary_document(job) for job in found], "has_more": len(found) == limit}
    )


@router.get("/v1/jobs/{job_id}")
async def get_job(job_id: str, gateway: Here, caller: Reader) -> Response:
    """The job, with its result once it has one."""
    return json_response(job_document(await gateway.client.get(_job_id(job_id), tenant=caller.tenant)))


@router.delete("/v1/jobs/{job_id}")
async def cancel_job(job_id: str, gateway: Here, caller: Canceller) -> Response:
    """Ask for its end. A running job is `cancelled` a little later, with the tokens it has; an ended one stays."""
    wanted = _job_id(job_id)
    state = (await gateway.client.cancel(wanted, tenant=caller.tenant)).get(wanted)
    if state is None:
        raise NotFound(f"no job has the id {wanted}")
    requested = state in (JobState.QUEUED, JobState.RUNNING, JobState.CANCELLED)
    return json_response({"id": wanted, "object": "job", "state": state, "cancel_requested": requested})


@router.get("/v1/jobs/{job_id}/events")
async def follow_job(job_id: str, request: Request, gateway: Here, caller: Reader) -> Response:
    """Its tokens as server-sent events. `id:` is the number of tokens so far and a checksum of them: send it back as
    Last-Event-ID, or as `?after=`, to go on where a connection was cut, without a gap or a repeat."""
    job = await gateway.client.get(_job_id(job_id), tenant=caller.tenant)
    text = request.headers.get("last-event-id") or request.query_params.get("after", "0")
    after = Place.parse(text)
    if after is None:
        raise Invalid(
            "after", f"{text[:32]!r} is no place in a stream", "Send the id of its last event, or leave it out"
        )
    return EventStream(job_events(gateway, job, after), headers={"x-request-id": str(job.id)})


def _job_id(text: str, field: str = "id") -> UUID:
    """Completions carry their job's id behind a prefix."""
    return parse_id(text.removeprefix("chatcmpl-").removeprefix("cmpl-"), field)


def _state(text: str | None) -> JobState | None:
    if text is None:
        return None
    try:
        return JobState(text)
    except ValueError as error:
        raise Invalid("state", f"{text[:32]!r} is no state", f"Use one of: {', '.join(JobState)}") from error


def _number(field: str, text: str, *, minimum: int, maximum: int) -> int:
    if not (text.isascii() and text.isdecimal()) or not minimum <= int(text[:12]) <= maximum:
        raise Invalid(field, f"{text[:32]!r} is no number from {minimum} to {maximum}", "Send one, or leave it out")
    return int(text)
