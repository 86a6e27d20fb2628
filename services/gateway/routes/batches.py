"""OpenAI's door to batches: files of requests, each of which becomes a job."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from services.gateway.batches.bodies import (
    BatchDocument,
    BatchList,
    BatchQuery,
    BatchRequest,
    batch_id_of,
)
from services.gateway.batches.creation import create
from services.gateway.context import GatewayDep
from services.gateway.errors import json_response
from services.gateway.guard import CancelCaller, ReadCaller, SubmitCaller
from services.gateway.http.query import described, path_id, query
from services.gateway.schemas import GUARDED, answer, errors, json_body, parameters
from shardline.contract.batches.batch import BATCH_ID, PREFIX
from shardline.store import batches

ROUTE = "/v1/batches"
ONE = f"{ROUTE}/{{batch_id}}"
KEY = {"type": "string", "minLength": 1, "maxLength": 256}

router = APIRouter(
    tags=["OpenAI"], default_response_class=Response, responses=errors(*GUARDED, 400, 404)
)

BatchIdPath = Annotated[str, Path(json_schema_extra={"pattern": BATCH_ID})]


@router.post(
    ROUTE,
    openapi_extra={**json_body(BatchRequest), **parameters(header={"Idempotency-Key": KEY})},
    responses={200: answer("The batch", BatchDocument), **errors(408, 409, 413, 415)},
)
async def create_batch(request: Request, gateway: GatewayDep, caller: SubmitCaller) -> Response:
    """Run the requests of a file, behind all that somebody waits for: each line is a job. With an
    `Idempotency-Key` a repeat finds the same batch."""
    return json_response(BatchDocument.of(await create(gateway, request, caller)))


@router.get(
    ROUTE,
    openapi_extra=parameters(query=described(BatchQuery)),
    responses={200: answer("A page", BatchList)},
)
async def list_batches(request: Request, gateway: GatewayDep, caller: ReadCaller) -> Response:
    """List the tenant's batches, newest first."""
    asked = query(request, BatchQuery)
    page = partial(
        batches.list_batches,
        tenant=caller.tenant,
        limit=asked.limit,
        after=None if asked.after is None else batch_id_of(asked.after, "after"),
    )
    found, has_more = await gateway.client.ask(page)
    data = [BatchDocument.of(one) for one in found]
    return json_response(
        BatchList(
            data=data,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
            has_more=has_more,
        )
    )


@router.get(ONE, responses={200: answer("The batch", BatchDocument)})
async def get_batch(batch_id: BatchIdPath, gateway: GatewayDep, caller: ReadCaller) -> Response:
    """A batch. Its output can be read while it runs."""
    wanted = partial(batches.get_batch, batch_id=path_id(batch_id, PREFIX), tenant=caller.tenant)
    return json_response(BatchDocument.of(await gateway.client.ask(wanted)))


@router.post(f"{ONE}/cancel", responses={200: answer("As it is now", BatchDocument), **errors(409)})
async def cancel_batch(
    batch_id: BatchIdPath, gateway: GatewayDep, caller: CancelCaller
) -> Response:
    """Cancel what of a batch has not ended; what is done stays."""
    wanted = partial(batches.cancel_batch, batch_id=path_id(batch_id, PREFIX), tenant=caller.tenant)
    row = await gateway.client.ask(wanted)
    gateway.batches_due.set()
    return json_response(BatchDocument.of(row))
