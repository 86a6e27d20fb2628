"""OpenAI's door to stored chat completions: those asked for with `store: true`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Path, Request, Response
from starlette.datastructures import QueryParams

from services.gateway.context import Gateway, GatewayDep
from services.gateway.errors import json_response
from services.gateway.guard import CancelCaller, ReadCaller, SubmitCaller
from services.gateway.http.json_body import read_object
from services.gateway.http.query import described, path_id, query_of
from services.gateway.openai.stored_answers import PREFIX, message_page, stored_answer
from services.gateway.openai.stored_bodies import (
    CompletionList,
    CompletionQuery,
    DeletedCompletion,
    MessageList,
    MessageQuery,
    MetadataChange,
    StoredChatCompletion,
)
from services.gateway.request_body import check_is_json
from services.gateway.schemas import GUARDED, answer, errors, json_body, parameters
from shardline.base.errors import Invalid
from shardline.contract.ids import parse_id
from shardline.contract.request_parsing import check_metadata, invalid_from
from shardline.store.connection.encoding import unstorable

ROUTE = "/v1/chat/completions"
ONE = f"{ROUTE}/{{completion_id}}"
MAX_FILTERS = 16
FILTER = "metadata["

router = APIRouter(
    tags=["OpenAI"], default_response_class=Response, responses=errors(*GUARDED, 400, 404)
)

COMPLETION_ID = rf"^({PREFIX})?[0-9a-f]{{8}}(-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}}$"
IdPath = Annotated[str, Path(json_schema_extra={"pattern": COMPLETION_ID})]


@router.get(
    ROUTE,
    openapi_extra=parameters(query=described(CompletionQuery)),
    responses={200: answer("A page", CompletionList)},
)
async def list_completions(request: Request, gateway: GatewayDep, caller: ReadCaller) -> Response:
    """List the tenant's stored completions; `metadata[key]=value` finds those that have it."""
    metadata, others = _filters(request.query_params)
    asked = query_of(others, CompletionQuery)
    found, has_more = await gateway.client.list_stored(
        tenant=caller.tenant,
        model=asked.model,
        metadata=metadata,
        limit=asked.limit,
        after=None if asked.after is None else parse_id(asked.after.removeprefix(PREFIX), "after"),
        is_ascending=asked.order == "asc",
    )
    data = [await stored_answer(gateway, one) for one in found]
    page = CompletionList(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=has_more,
    )
    return json_response(page)


@router.get(ONE, responses={200: answer("As it was answered", StoredChatCompletion)})
async def get_completion(
    completion_id: IdPath, gateway: GatewayDep, caller: ReadCaller
) -> Response:
    """A stored completion."""
    found = await gateway.client.get_stored(path_id(completion_id, PREFIX), tenant=caller.tenant)
    return json_response(await stored_answer(gateway, found))


@router.get(
    f"{ONE}/messages",
    openapi_extra=parameters(query=described(MessageQuery)),
    responses={200: answer("A page", MessageList)},
)
async def list_messages(
    completion_id: IdPath, request: Request, gateway: GatewayDep, caller: ReadCaller
) -> Response:
    """The messages that a stored completion was asked with."""
    asked = query_of(request.query_params.multi_items(), MessageQuery)
    found = await gateway.client.get_stored(path_id(completion_id, PREFIX), tenant=caller.tenant)
    page = message_page(
        found, limit=asked.limit, after=asked.after, is_ascending=asked.order == "asc"
    )
    return json_response(page)


@router.post(
    ONE,
    openapi_extra=json_body(MetadataChange),
    responses={200: answer("Its new form", StoredChatCompletion), **errors(408, 413, 415)},
)
async def change_completion(
    completion_id: IdPath, request: Request, gateway: GatewayDep, caller: SubmitCaller
) -> Response:
    """Replace a stored completion's metadata."""
    wanted = path_id(completion_id, PREFIX)
    metadata = await _metadata(gateway, request)
    found = await gateway.client.change_stored(wanted, metadata, tenant=caller.tenant)
    return json_response(await stored_answer(gateway, found))


@router.delete(ONE, responses={200: answer("It is stored no more", DeletedCompletion)})
async def delete_completion(
    completion_id: IdPath, gateway: GatewayDep, caller: CancelCaller
) -> Response:
    """Delete a stored completion from these routes; its job stays until its retention passes."""
    wanted = path_id(completion_id, PREFIX)
    await gateway.client.forget_stored(wanted, tenant=caller.tenant)
    return json_response(DeletedCompletion(id=f"{PREFIX}{wanted}", deleted=True))


async def _metadata(gateway: Gateway, request: Request) -> dict[str, Any]:
    check_is_json(request)
    with gateway.admission.reading() as room:
        document = read_object(await gateway.admission.read(request, room))
    try:
        metadata = msgspec.convert(document, MetadataChange).metadata or {}
    except msgspec.ValidationError as error:
        raise invalid_from(error) from error
    check_metadata(metadata)
    if (problem := unstorable(metadata)) is not None:
        raise Invalid("metadata", problem, "Change it: Postgres cannot store it")
    return metadata


def _filters(params: QueryParams) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Takes `metadata[key]=value` out of a query."""
    metadata: dict[str, str] = {}
    others: list[tuple[str, str]] = []
    for name, value in params.multi_items():
        if not (name.startswith(FILTER) and name.endswith("]")):
            others.append((name, value))
            continue
        if unstorable([name, value]) is not None:
            raise Invalid("metadata", "it holds what Postgres cannot store", "Change it")
        metadata[name.removeprefix(FILTER)[:-1]] = value
    if len(metadata) > MAX_FILTERS:
        raise Invalid("metadata", f"there are more than {MAX_FILTERS} keys", "Send fewer")
    return metadata, others
