"""OpenAI's two doors: `POST /v1/completions` and `POST /v1/chat/completions`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from services.gateway.context import GatewayDep
from services.gateway.guard import SubmitCaller
from services.gateway.openai.completion_response import complete
from services.gateway.openai.requests import chat_request, completion_request
from services.gateway.schemas import (
    EVENTS,
    GUARDED,
    JSON,
    REQUEST_ID,
    TAKING,
    answer,
    body,
    chunks,
    errors,
)
from services.gateway.submit import submit

router = APIRouter(
    tags=["OpenAI"], default_response_class=Response, responses=errors(*GUARDED, *TAKING, 504)
)

STREAMED = (
    "With `stream` as server-sent events: chunks in OpenAI's form, "
    "an error as the last, then `[DONE]`"
)


@router.post(
    "/v1/completions",
    openapi_extra=body("CompletionRequest"),
    responses={
        200: answer(
            STREAMED, {JSON: "Completion", EVENTS: chunks("CompletionChunk")}, headers=(REQUEST_ID,)
        )
    },
)
async def create_completion(
    request: Request, gateway: GatewayDep, caller: SubmitCaller
) -> Response:
    """Complete a prompt (text or token ids), whole or as a stream."""
    accepted = await submit(gateway, request, caller, completion_request)
    return await complete(gateway, request, accepted, is_chat=False)


@router.post(
    "/v1/chat/completions",
    openapi_extra=body("ChatCompletionRequest"),
    responses={
        200: answer(
            STREAMED, {JSON: "ChatCompletion", EVENTS: chunks("ChatChunk")}, headers=(REQUEST_ID,)
        )
    },
)
async def create_chat_completion(
    request: Request, gateway: GatewayDep, caller: SubmitCaller
) -> Response:
    """Answer messages, whole or as a stream."""
    accepted = await submit(gateway, request, caller, chat_request)
    return await complete(gateway, request, accepted, is_chat=True)
