"""The native door to many jobs at once: all that match a filter are cancelled, submitted again or
given another priority."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta, Struct

from services.gateway.context import Gateway, GatewayDep
from services.gateway.errors import Forbidden, json_response
from services.gateway.guard import Caller, CancelCaller, SubmitCaller
from services.gateway.request_body import read_body
from services.gateway.schemas import GUARDED, answer, errors, json_body
from shardline.contract.job import PRIORITIES
from shardline.contract.job_filter import JobFilter, parse_filter
from shardline.store.bulk_acts import Act, bulk_act

router = APIRouter(tags=["jobs"], default_response_class=Response, responses=errors(*GUARDED, 400))

Filter = Annotated[
    JobFilter, Meta(description="All that is given must hold; its tenant is the key's")
]


class BulkRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/jobs/cancel` and `/v1/jobs/retry`."""

    filter: Filter
    dry_run: bool = False
    """Counts only."""


class PrioritizeRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/jobs/prioritize`."""

    filter: Filter
    priority: Annotated[int, Meta(ge=PRIORITIES[0], le=PRIORITIES[-1])]
    dry_run: bool = False
    """Counts only."""


class JobsChanged(Struct, frozen=True, kw_only=True, tag_field="object", tag="jobs.changed"):
    """How many jobs were changed; of a dry run how many would be."""

    changed: int
    has_more: bool
    """Ask again: there are more than one request changes."""


RESPONSES = {200: answer("Done", JobsChanged), **errors(408, 413, 415)}


@router.post("/v1/jobs/cancel", openapi_extra=json_body(BulkRequest), responses=RESPONSES)
async def cancel_jobs(request: Request, gateway: GatewayDep, caller: CancelCaller) -> Response:
    """Cancel the tenant's jobs that match, each as `DELETE /v1/jobs/{job_id}` does."""
    asked = await read_body(gateway, request, BulkRequest)
    return await _done(gateway, caller, Act.CANCEL, asked)


@router.post("/v1/jobs/retry", openapi_extra=json_body(BulkRequest), responses=RESPONSES)
async def retry_jobs(request: Request, gateway: GatewayDep, caller: SubmitCaller) -> Response:
    """Submit the tenant's jobs that match again as new jobs, each once: those that failed, or that
    are in the filter's state."""
    asked = await read_body(gateway, request, BulkRequest)
    return await _done(gateway, caller, Act.RETRY, asked)


@router.post("/v1/jobs/prioritize", openapi_extra=json_body(PrioritizeRequest), responses=RESPONSES)
async def prioritize_jobs(request: Request, gateway: GatewayDep, caller: SubmitCaller) -> Response:
    """Give the tenant's queued jobs that match another priority."""
    asked = await read_body(gateway, request, PrioritizeRequest)
    return await _done(gateway, caller, Act.PRIORITIZE, asked, asked.priority)


async def _done(
    gateway: Gateway,
    caller: Caller,
    act: Act,
    asked: BulkRequest | PrioritizeRequest,
    priority: int | None = None,
) -> Response:
    where = parse_filter(asked.filter)
    if where.tenant not in (None, caller.tenant):
        raise Forbidden("tenant: it is not the one of your API key. Leave it out", field="tenant")
    where = msgspec.structs.replace(where, tenant=caller.tenant)
    done = await gateway.client.act(
        bulk_act(act, where, priority=priority, key_name=caller.key_name),
        dry_run=asked.dry_run,
        key_id=caller.key_id,
    )
    return json_response(JobsChanged(changed=done.num_changed, has_more=done.has_more))
