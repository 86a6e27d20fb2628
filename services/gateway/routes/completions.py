"""OpenAI's two doors: `POST /v1/completions` and `POST /v1/chat/completions`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from services.gateway.context import GatewayDep
from services.gateway.guard import SubmitCaller
from services.gateway.openai import bodies
from services.gateway.openai.completion_response import complete
from services.gateway.openai.requests import chat_request, completion_request
from services.gateway.openai.responses import ChatResponses, CompletionResponses
from services.gateway.schemas import GUARDED, REQUEST_ID, TAKING, answer, body, chunks, errors
from services.gateway.submit import submit

router = APIRouter(
    tags=["OpenAI"], default_response_class=Response, responses=errors(*GUARDED, *TAKING, 504)
)

STREAMED = (
    "With `stream` as server-sent events: chunks in OpenAI's form, "
    "an error as the last, then `[DONE]`"
)
IDS = (REQUEST_ID,)
COMPLETION = answer(STREAMED, bodies.Completion, chunks(bodies.CompletionChunk), headers=IDS)
CHAT_COMPLETION = answer(STREAMED, bodies.ChatCompletion, chunks(bodies.ChatChunk), headers=IDS)


@router.post(
    "/v1/completions",
    openapi_extra=body(bodies.CompletionRequest),
    responses={200: COMPLETION},
)
async def create_completion(
    request: Request, gateway: GatewayDep, caller: SubmitCaller
) -> Response:
    """Complete a prompt (text or token ids), whole or as a stream."""
    accepted = await submit(gateway, request, caller, completion_request)
    return await complete(gateway, request, accepted, CompletionResponses)


@router.post(
    "/v1/chat/completions",
    openapi_extra=body(bodies.ChatCompletionRequest),
    responses={200: CHAT_COMPLETION},
)
async def create_chat_completion(
    request: Request, gateway: GatewayDep, caller: SubmitCaller
) -> Response:
    """Answer messages, whole or as a stream."""
    accepted = await submit(gateway, request, caller, chat_request)
    return await complete(gateway, request, accepted, ChatResponses)
