"""OpenAI's newest door: responses, which are jobs, with events that can be read again."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Request, Response
from msgspec import Meta, Struct, convert, field

from services.gateway.context import GatewayDep
from services.gateway.errors import json_response
from services.gateway.guard import CancelCaller, ReadCaller, SubmitCaller
from services.gateway.http.query import described, query
from services.gateway.http.sse import EventStream
from services.gateway.responses.answers import PREFIX
from services.gateway.responses.conversation import listed
from services.gateway.responses.creation import (
    count_input,
    create,
    stored_answers,
    stored_row,
)
from services.gateway.responses.documents import InputTokens, ResponseDeleted, ResponseDocument
from services.gateway.responses.events import EVENTS
from services.gateway.responses.input_items import Items
from services.gateway.responses.output_items import ItemList
from services.gateway.responses.request_fields import ResponseFields
from services.gateway.responses.requests import ELSEWHERE
from services.gateway.responses.response_events import BEFORE_ALL, response_events, whole
from services.gateway.schemas import (
    GUARDED,
    REQUEST_ID,
    TAKING,
    answer,
    body_beside,
    errors,
    parameters,
    typed_events,
)
from shardline.base.errors import Invalid, NotFound

router = APIRouter(
    tags=["responses"], default_response_class=Response, responses=errors(*GUARDED, 400)
)

IDS = (REQUEST_ID,)
RESPONSE_ID = r"^(resp_)?[0-9a-f]{8}-?([0-9a-f]{4}-?){3}[0-9a-f]{12}$"
ResponseIdPath = Annotated[str, Path(json_schema_extra={"pattern": RESPONSE_ID})]
"""Described only: `stored_answers` reports better what is wrong."""

STREAMED = "With `stream` as server-sent events, then `[DONE]`"
CANCEL_WAIT_S = 5.0
"""How long a cancellation waits for the end of a running job, which is a heartbeat away."""

MAX_NUMBER = 10**9
Flag = Literal["true", "false"]


class RetrieveQuery(Struct, frozen=True, kw_only=True):
    """The query of `GET /v1/responses/{response_id}`. What it includes was decided when it was
    made."""

    stream: Flag = "false"
    starting_after: Annotated[int, Meta(ge=0, le=MAX_NUMBER)] | None = None
    include_obfuscation: Flag = "false"
    include: str | None = None
    included: str | None = field(default=None, name="include[]")


class ItemsQuery(Struct, frozen=True, kw_only=True):
    """The query of `GET /v1/responses/{response_id}/input_items`."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: Annotated[str, Meta(description="`last_id` of the page before")] | None = None
    include: str | None = None
    included: str | None = field(default=None, name="include[]")


@router.post(
    "/v1/responses",
    openapi_extra=body_beside(ResponseFields, without=ELSEWHERE),
    responses={
        200: answer(STREAMED, ResponseDocument, typed_events(EVENTS), headers=IDS),
        **errors(*TAKING),
    },
)
async def create_response(request: Request, gateway: GatewayDep, caller: SubmitCaller) -> Response:
    """Answer items, whole, as a stream, or in the background: then it returns at once, and the
    response is asked for by its id."""
    return await create(gateway, request, caller)


@router.post(
    "/v1/responses/input_tokens",
    openapi_extra=body_beside(ResponseFields, without=ELSEWHERE),
    responses={200: answer("The input's tokens", InputTokens), **errors(*TAKING)},
)
async def count_input_tokens(
    request: Request, gateway: GatewayDep, caller: SubmitCaller
) -> Response:
    """The number of tokens that a response would read, with the conversation, tools and chat
    template. Stores nothing."""
    return json_response(InputTokens(input_tokens=await count_input(gateway, request, caller)))


@router.get(
    "/v1/responses/{response_id}",
    openapi_extra=parameters(query=described(RetrieveQuery)),
    responses={
        200: answer(STREAMED, ResponseDocument, typed_events(EVENTS)),
        **errors(404),
    },
)
async def get_response(
    response_id: ResponseIdPath, request: Request, gateway: GatewayDep, caller: ReadCaller
) -> Response:
    """A stored response. With `stream` its events, which are the same with the same numbers however
    often they are read: `starting_after` leaves out those up to a number."""
    asked = query(request, RetrieveQuery)
    is_streamed = asked.stream == "true"
    if asked.starting_after is not None and not is_streamed:
        raise Invalid("starting_after", "it is for streams", "Send stream=true, or leave it out")
    answers = await stored_answers(gateway, response_id, caller)
    if not is_streamed:
        return json_response(await whole(answers))
    after = BEFORE_ALL if asked.starting_after is None else asked.starting_after
    return EventStream(response_events(gateway, answers, after=after))


@router.delete(
    "/v1/responses/{response_id}",
    responses={200: answer("It was there", ResponseDeleted), **errors(404)},
)
async def delete_response(
    response_id: ResponseIdPath, gateway: GatewayDep, caller: CancelCaller
) -> Response:
    """Delete a response: its own input, and all that answers by its id. Its job is cancelled if it
    has not ended, and is kept as long as others."""
    job_id = (await stored_row(gateway, response_id, caller)).job.id
    if not await gateway.client.delete_response(job_id, tenant=caller.tenant):
        raise NotFound(f"no response has the id {PREFIX}{job_id}")
    return json_response(ResponseDeleted(id=f"{PREFIX}{job_id}"))


@router.post(
    "/v1/responses/{response_id}/cancel",
    responses={200: answer("As it is afterwards", ResponseDocument), **errors(404)},
)
async def cancel_response(
    response_id: ResponseIdPath, gateway: GatewayDep, caller: CancelCaller
) -> Response:
    """Cancel a response, also one in the foreground. One that has ended stays as it is."""
    job_id = (await stored_row(gateway, response_id, caller)).job.id
    await gateway.client.cancel(job_id, tenant=caller.tenant)
    try:
        async with asyncio.timeout(CANCEL_WAIT_S):
            await gateway.client.until_ended(job_id)
    except TimeoutError:
        pass
    return json_response(await whole(await stored_answers(gateway, response_id, caller)))


@router.get(
    "/v1/responses/{response_id}/input_items",
    openapi_extra=parameters(query=described(ItemsQuery)),
    responses={200: answer("A page", ItemList), **errors(404)},
)
async def list_input_items(
    response_id: ResponseIdPath, request: Request, gateway: GatewayDep, caller: ReadCaller
) -> Response:
    """The items of a response's own request, in pages, the last one first unless `order` is asc."""
    asked = query(request, ItemsQuery)
    row = await stored_row(gateway, response_id, caller)
    items = listed(row.job.id, convert(row.input, Items))
    if asked.order == "desc":
        items.reverse()
    start = 0
    if asked.after is not None:
        places = [place for place, item in enumerate(items) if item.id == asked.after]
        if not places:
            problem = f"{asked.after[:64]!r} is none of its items"
            raise Invalid("after", problem, "Send last_id of a page, or leave it out")
        start = places[0] + 1
    page = items[start : start + asked.limit]
    return json_response(
        ItemList(
            data=page,
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
            has_more=start + len(page) < len(items),
        )
    )
