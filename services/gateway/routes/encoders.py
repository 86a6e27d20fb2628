"""The doors of encoders: OpenAI's `POST /v1/embeddings`, Cohere's and Jina's `POST /v1/rerank`
(Cohere's clients: `/v2/rerank`), vLLM's `POST /v1/score`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from services.gateway.context import GatewayDep
from services.gateway.encoders.answers import EncoderDoor, embedding_list, ranking, score_list
from services.gateway.encoders.bodies import (
    EmbeddingList,
    EmbeddingRequest,
    Ranking,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)
from services.gateway.encoders.requests import embedded_texts, ranked_pairs, scored_pairs
from services.gateway.guard import SubmitCaller
from services.gateway.schemas import GUARDED, REQUEST_ID, TAKING, answer, body, errors
from shardline.contract.encoders.encoder import EncoderTask

PATHS = ("/rerank",)
"""Without a version, as Jina's and llama.cpp's clients ask."""

router = APIRouter(
    tags=["encoders"], default_response_class=Response, responses=errors(*GUARDED, *TAKING, 504)
)

EMBEDDINGS = EncoderDoor(
    name="embd",
    kind=EmbeddingRequest,
    task=EncoderTask.EMBED,
    field="input",
    texts=embedded_texts,
    document=embedding_list,
)
RANKINGS = EncoderDoor(
    name="rerank",
    kind=RerankRequest,
    task=EncoderTask.SCORE,
    field="documents",
    texts=ranked_pairs,
    document=ranking,
)
SCORES = EncoderDoor(
    name="score",
    kind=ScoreRequest,
    task=EncoderTask.SCORE,
    field="text_2",
    texts=scored_pairs,
    document=score_list,
)


@router.post(
    "/v1/embeddings",
    openapi_extra=body(EmbeddingRequest),
    responses={200: answer("A vector of each text", EmbeddingList, headers=(REQUEST_ID,))},
)
async def create_embeddings(
    request: Request, gateway: GatewayDep, caller: SubmitCaller
) -> Response:
    """Turn texts into vectors."""
    return await EMBEDDINGS.answer(gateway, request, caller)


RERANK: dict[str, Any] = {
    "openapi_extra": body(RerankRequest),
    "responses": {200: answer("The documents by their scores", Ranking, headers=(REQUEST_ID,))},
}


@router.post("/v1/rerank", **RERANK)
@router.post("/v2/rerank", **RERANK)
@router.post(PATHS[0], **RERANK)
async def rerank(request: Request, gateway: GatewayDep, caller: SubmitCaller) -> Response:
    """Score documents by a query, and order them."""
    return await RANKINGS.answer(gateway, request, caller)


@router.post(
    "/v1/score",
    openapi_extra=body(ScoreRequest),
    responses={200: answer("A score of each pair", ScoreList, headers=(REQUEST_ID,))},
)
async def score(request: Request, gateway: GatewayDep, caller: SubmitCaller) -> Response:
    """Score pairs of texts."""
    return await SCORES.answer(gateway, request, caller)
