"""OpenAI's two doors: `POST /v1/completions` and `POST /v1/chat/completions`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from services.gateway.context import GatewayDep
from services.gateway.guard import SubmitCaller
from services.gateway.openai import bodies
from services.gateway.openai.choice_answers import complete_choices
from services.gateway.openai.choice_requests import chat_choices, completion_choices
from services.gateway.openai.responses import ChatResponses, CompletionResponses
from services.gateway.schemas import GUARDED, REQUEST_ID, TAKING, answer, body, chunks, errors
from services.gateway.submit import submit_choices

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
    """Complete one prompt or several (text or token ids), whole or as a stream."""
    choices = await submit_choices(gateway, request, caller, completion_choices)
    return await complete_choices(gateway, request, choices, CompletionResponses)


@router.post(
    "/v1/chat/completions",
    openapi_extra=body(bodies.ChatCompletionRequest),
    responses={200: CHAT_COMPLETION},
)
async def create_chat_completion(
    request: Request, gateway: GatewayDep, caller: SubmitCaller
) -> Response:
    """Answer messages, whole or as a stream."""
    choices = await submit_choices(gateway, request, caller, chat_choices)
    return await complete_choices(gateway, request, choices, ChatResponses)
