"""OpenAI's door to webhook endpoints, and ours to what they have heard."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Path, Request, Response

from services.gateway.context import Gateway, GatewayDep
from services.gateway.errors import json_response
from services.gateway.guard import CancelCaller, ReadCaller, SubmitCaller
from services.gateway.http.query import described, query
from services.gateway.request_body import read_body
from services.gateway.schemas import GUARDED, answer, errors, json_body, parameters
from services.gateway.webhooks.bodies import (
    ENDPOINT_ID,
    DeliveriesReplayed,
    DeliveryDocument,
    DeliveryList,
    DeliveryQuery,
    EndpointDeleted,
    EndpointDocument,
    EndpointList,
    EndpointQuery,
    EndpointRequest,
    EndpointTested,
    EndpointTestRequest,
    EndpointUpdate,
    EndpointWithSecret,
    EventTypeList,
    ReplayRequest,
    RotateRequest,
)
from shardline.base.errors import Invalid, Unavailable
from shardline.contract.webhooks.event import ENDPOINT, EventType
from shardline.store.webhooks import deliveries, endpoints
from shardline.store.webhooks.deliveries import WebhookDelivery, delivery_id_of
from shardline.store.webhooks.endpoints import DAY_S, EndpointChange, NewEndpoint, endpoint_id_of

ROUTE = "/v1/webhook_endpoints"
ONE = f"{ROUTE}/{{webhook_endpoint_id}}"
TEST_LOOKS = 100
LOOK_S = 0.25
"""A sample is waited for in looks: 25 s, more than an attempt takes."""

router = APIRouter(
    tags=["OpenAI"], default_response_class=Response, responses=errors(*GUARDED, 400)
)

EndpointIdPath = Annotated[str, Path(json_schema_extra={"pattern": ENDPOINT_ID})]


@router.get("/v1/webhook_event_types", responses={200: answer("All", EventTypeList)})
async def list_event_types(caller: ReadCaller) -> Response:  # noqa: ARG001 (asks for its key)
    """List the events that an endpoint may hear of."""
    return json_response(EventTypeList(data=list(EventType)))


@router.post(
    ROUTE,
    openapi_extra=json_body(EndpointRequest),
    responses={
        200: answer("The endpoint, with its secret", EndpointWithSecret),
        **errors(408, 409, 413, 415),
    },
)
async def create_endpoint(request: Request, gateway: GatewayDep, caller: SubmitCaller) -> Response:
    """Send events to a URL when jobs, responses and batches of the tenant end. The answer shows the
    signing secret, this once."""
    asked = await read_body(gateway, request, EndpointRequest)
    new = NewEndpoint(
        url=asked.url, name=asked.name, event_types=asked.event_types, tenant=caller.tenant
    )
    reach = gateway.settings.webhook_reach
    work = partial(endpoints.create, new=new, reach=reach)
    made = await gateway.client.ask(work, key_id=caller.key_id)
    return json_response(EndpointWithSecret.of(made))


@router.get(
    ROUTE,
    openapi_extra=parameters(query=described(EndpointQuery)),
    responses={200: answer("A page", EndpointList)},
)
async def list_endpoints(request: Request, gateway: GatewayDep, caller: ReadCaller) -> Response:
    """List the tenant's endpoints, newest first."""
    asked = query(request, EndpointQuery)
    after = None if asked.after is None else endpoint_id_of(asked.after, "after")
    found = await gateway.client.ask(partial(endpoints.list_endpoints, tenant=caller.tenant))
    ids = [row.id for row in found]
    if after is not None and after not in ids:
        raise Invalid("after", f"there is no endpoint {ENDPOINT}{after}", "List from the start")
    behind = found[0 if after is None else ids.index(after) + 1 :]
    data = [EndpointDocument.of(row) for row in behind[: asked.limit]]
    return json_response(
        EndpointList(
            data=data,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
            has_more=len(behind) > len(data),
        )
    )


@router.get(ONE, responses={200: answer("The endpoint", EndpointDocument), **errors(404)})
async def get_endpoint(
    webhook_endpoint_id: EndpointIdPath, gateway: GatewayDep, caller: ReadCaller
) -> Response:
    """An endpoint, and whether it takes what it is sent."""
    endpoint_id = endpoint_id_of(webhook_endpoint_id)
    wanted = partial(endpoints.get_endpoint, endpoint_id=endpoint_id, tenant=caller.tenant)
    return json_response(EndpointDocument.of(await gateway.client.ask(wanted)))


@router.post(
    ONE,
    openapi_extra=json_body(EndpointUpdate),
    responses={
        200: answer("As it is now", EndpointDocument),
        **errors(404, 408, 413, 415),
    },
)
async def update_endpoint(
    webhook_endpoint_id: EndpointIdPath,
    request: Request,
    gateway: GatewayDep,
    caller: SubmitCaller,
) -> Response:
    """Change an endpoint, disable it, or enable it again."""
    asked = await read_body(gateway, request, EndpointUpdate)
    wanted = EndpointChange(
        url=asked.url, name=asked.name, event_types=asked.event_types, enabled=asked.enabled
    )
    work = partial(
        endpoints.change,
        endpoint_id=endpoint_id_of(webhook_endpoint_id),
        wanted=wanted,
        tenant=caller.tenant,
        reach=gateway.settings.webhook_reach,
    )
    changed = await gateway.client.ask(work, key_id=caller.key_id)
    return json_response(EndpointDocument.of(changed))


@router.delete(ONE, responses={200: answer("Deleted", EndpointDeleted), **errors(404)})
async def delete_endpoint(
    webhook_endpoint_id: EndpointIdPath, gateway: GatewayDep, caller: CancelCaller
) -> Response:
    """Delete an endpoint. What waits for it is never sent."""
    endpoint_id = endpoint_id_of(webhook_endpoint_id)
    work = partial(endpoints.delete, endpoint_id=endpoint_id, tenant=caller.tenant)
    await gateway.client.ask(work, key_id=caller.key_id)
    return json_response(EndpointDeleted(id=f"{ENDPOINT}{endpoint_id}"))


@router.post(
    f"{ONE}/rotate_secret",
    openapi_extra=json_body(RotateRequest),
    responses={
        200: answer("The endpoint, with its new secret", EndpointWithSecret),
        **errors(404, 408, 409, 413, 415),
    },
)
async def rotate_secret(
    webhook_endpoint_id: EndpointIdPath,
    request: Request,
    gateway: GatewayDep,
    caller: SubmitCaller,
) -> Response:
    """Give an endpoint a new secret. The old one ends at once, or signs too for a day."""
    asked = await read_body(gateway, request, RotateRequest)
    work = partial(
        endpoints.rotate,
        endpoint_id=endpoint_id_of(webhook_endpoint_id),
        grace_s=DAY_S if asked.keep_old_secret_active_for_24_hours else 0.0,
        tenant=caller.tenant,
    )
    rotated = await gateway.client.ask(work, key_id=caller.key_id)
    return json_response(EndpointWithSecret.of(rotated))


@router.post(
    f"{ONE}/test",
    openapi_extra=json_body(EndpointTestRequest),
    responses={200: answer("It answered", EndpointTested), **errors(404, 408, 409, 413, 415)},
)
async def test_endpoint(
    webhook_endpoint_id: EndpointIdPath,
    request: Request,
    gateway: GatewayDep,
    caller: SubmitCaller,
) -> Response:
    """Have a relay send a sample now, once, and return the endpoint's answer."""
    asked = await read_body(gateway, request, EndpointTestRequest)
    endpoint_id = endpoint_id_of(webhook_endpoint_id)
    begin = partial(
        deliveries.begin_test,
        endpoint_id=endpoint_id,
        event_type=asked.event_type,
        tenant=caller.tenant,
    )
    sent = await _sent_test(gateway, await gateway.client.ask(begin))
    if sent.status_code is None:
        problem = sent.error or "there was no answer"
        raise Invalid("url", problem, "Check the URL, and what listens there")
    return json_response(
        EndpointTested(
            webhook_endpoint_id=f"{ENDPOINT}{endpoint_id}",
            event_type=asked.event_type,
            status_code=sent.status_code,
        )
    )


@router.get(
    f"{ONE}/deliveries",
    openapi_extra=parameters(query=described(DeliveryQuery)),
    responses={200: answer("A page", DeliveryList), **errors(404)},
)
async def list_deliveries(
    webhook_endpoint_id: EndpointIdPath,
    request: Request,
    gateway: GatewayDep,
    caller: ReadCaller,
) -> Response:
    """List what an endpoint was sent, or is to be, newest first."""
    asked = query(request, DeliveryQuery)
    page = partial(
        deliveries.list_deliveries,
        endpoint_id=endpoint_id_of(webhook_endpoint_id),
        tenant=caller.tenant,
        state=asked.state,
        limit=asked.limit,
        after=None if asked.after is None else delivery_id_of(asked.after, "after"),
    )
    found, has_more = await gateway.client.ask(page)
    data = [DeliveryDocument.of(row) for row in found]
    return json_response(
        DeliveryList(
            data=data,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
            has_more=has_more,
        )
    )


@router.post(
    f"{ONE}/replay",
    openapi_extra=json_body(ReplayRequest),
    responses={
        200: answer("The number of events that are sent again", DeliveriesReplayed),
        **errors(404, 408, 409, 413, 415),
    },
)
async def replay_deliveries(
    webhook_endpoint_id: EndpointIdPath,
    request: Request,
    gateway: GatewayDep,
    caller: SubmitCaller,
) -> Response:
    """Send deliveries again: those that are named, or the oldest 1,000 that are dead."""
    asked = await read_body(gateway, request, ReplayRequest)
    ids = None if asked.ids is None else [delivery_id_of(name, "ids") for name in asked.ids]
    work = partial(
        deliveries.replay,
        endpoint_id=endpoint_id_of(webhook_endpoint_id),
        ids=ids,
        tenant=caller.tenant,
    )
    return json_response(DeliveriesReplayed(replayed=await gateway.client.ask(work)))


async def _sent_test(gateway: Gateway, delivery_id: UUID) -> WebhookDelivery:
    """Raises Unavailable where no relay has sent it in time."""
    for look in range(TEST_LOOKS):
        is_last = look == TEST_LOOKS - 1 or gateway.stopping.is_set()
        sent = await gateway.client.ask(
            partial(deliveries.end_test, delivery_id=delivery_id, is_last=is_last)
        )
        if sent is not None:
            return sent
        if is_last:
            break
        await asyncio.sleep(LOOK_S)
    raise Unavailable("no relay has sent the sample in time")
