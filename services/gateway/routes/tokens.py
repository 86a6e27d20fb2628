"""Routes that show prompts as a model reads them: vLLM's `/tokenize` and `/detokenize`, llama.cpp's
`/apply-template`. They stand where those servers have them, and store nothing."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Request, Response

from services.gateway.context import Gateway, GatewayDep
from services.gateway.errors import json_response
from services.gateway.guard import SubmitCaller
from services.gateway.http.json_body import read_object
from services.gateway.request_body import request_body
from services.gateway.schemas import GUARDED, TAKING, answer, errors, json_body
from services.gateway.token_bodies import (
    DetokenizeBody,
    ModelQuestion,
    PromptText,
    TemplateBody,
    TokenizeBody,
    TokenizedPrompt,
)
from shardline.base.errors import Invalid
from shardline.contract.request_parsing import parse_fields
from shardline_server.tokenize import RegisteredModel, Tokens

TOKENIZE: Final = "/tokenize"
DETOKENIZE: Final = "/detokenize"
APPLY_TEMPLATE: Final = "/apply-template"
PATHS = (TOKENIZE, DETOKENIZE, APPLY_TEMPLATE)

router = APIRouter(
    tags=["tokens"],
    default_response_class=Response,
    responses=errors(*GUARDED, *(status for status in TAKING if status != 409)),
)


@router.post(
    TOKENIZE,
    openapi_extra=json_body(TokenizeBody),
    responses={200: answer("The tokens", TokenizedPrompt)},
)
async def tokenize(request: Request, gateway: GatewayDep, _caller: SubmitCaller) -> Response:
    """The tokens of a prompt or of messages, also of more than the model's context."""
    async with request_body(gateway, request) as body:
        asked = await body.run(lambda: parse_fields(read_object(body.data), TokenizeBody))
        model = await _model(gateway, asked)
        return json_response(await body.run(_tokenized, model.tokens, asked))


@router.post(
    DETOKENIZE,
    openapi_extra=json_body(DetokenizeBody),
    responses={200: answer("The text", PromptText)},
)
async def detokenize(request: Request, gateway: GatewayDep, _caller: SubmitCaller) -> Response:
    """The text of tokens, special ones included."""
    async with request_body(gateway, request) as body:
        asked = await body.run(lambda: parse_fields(read_object(body.data), DetokenizeBody))
        model = await _model(gateway, asked)
        text = await body.run(model.tokens.decode, asked.tokens, field="tokens")
        return json_response(PromptText(prompt=text))


@router.post(
    APPLY_TEMPLATE,
    openapi_extra=json_body(TemplateBody),
    responses={200: answer("The text", PromptText)},
)
async def apply_template(request: Request, gateway: GatewayDep, _caller: SubmitCaller) -> Response:
    """The text that the model's chat template makes of messages."""
    async with request_body(gateway, request) as body:
        asked = await body.run(lambda: parse_fields(read_object(body.data), TemplateBody))
        model = await _model(gateway, asked)
        text = await body.run(model.tokens.prompt_text, asked.messages, asked.params())
        return json_response(PromptText(prompt=text))


async def _model(gateway: Gateway, asked: ModelQuestion) -> RegisteredModel:
    """The model that is asked about. Raises UnknownModel, Invalid, Unavailable."""
    if asked.model is not None:
        return await gateway.catalog.get(asked.model)
    names = await gateway.catalog.names()
    if len(names) != 1:
        problem = f"it is missing, and {len(names)} models are registered"
        raise Invalid("model", problem, "Name one of GET /v1/models")
    return await gateway.catalog.get(names[0])


def _tokenized(tokens: Tokens, asked: TokenizeBody) -> TokenizedPrompt:
    if (asked.prompt is None) == (asked.messages is None):
        problem = "exactly one of prompt and messages is needed"
        raise Invalid("prompt", problem, "Send one of the two")
    if asked.messages is not None:
        text = tokens.prompt_text(asked.messages, asked.params())
        with_special = asked.add_special_tokens is True
        ids = tokens.encode(text, field="messages", add_special_tokens=with_special)
    else:
        with_special = asked.add_special_tokens is not False
        ids = tokens.encode(asked.prompt or "", field="prompt", add_special_tokens=with_special)
    names = (str(tokens.tokenizer.id_to_token(token_id)) for token_id in ids)
    return TokenizedPrompt(
        count=len(ids),
        max_model_len=tokens.longest,
        tokens=ids,
        token_strs=tuple(names) if asked.return_token_strs else None,
    )
