"""OpenAI's door for questions: `POST /v1/decisions`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from services.gateway.context import GatewayDep
from services.gateway.decisions.answers import decide
from services.gateway.decisions.bodies import DecisionDocument, DecisionRequest
from services.gateway.guard import SubmitCaller
from services.gateway.schemas import GUARDED, REQUEST_ID, TAKING, answer, body, errors

router = APIRouter(
    tags=["OpenAI"], default_response_class=Response, responses=errors(*GUARDED, *TAKING, 504)
)

ANSWERS = answer("An answer to each question", DecisionDocument, headers=(REQUEST_ID,))


@router.post("/v1/decisions", openapi_extra=body(DecisionRequest), responses={200: ANSWERS})
async def create_decision(request: Request, gateway: GatewayDep, caller: SubmitCaller) -> Response:
    """Answer questions about an input with probabilities, read from the model's logits."""
    return await decide(gateway, request, caller)
