"""What operators and clients ask about the service: is it alive and ready, its models, its figures, its description."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from services.gateway.catalogue import Model
from services.gateway.errors import json_response
from services.gateway.guard import Admin, Reader
from services.gateway.state import Gateway, Here
from shardline.client.database import reachable
from shardline.errors import Unavailable
from shardline.store.pipelines import LivePipeline, live_pipelines

router = APIRouter(tags=["operating"])


@router.get("/health")
async def health() -> Response:
    """This process answers. It says nothing about the others."""
    return json_response({"status": "ok"})


@router.get("/ready")
async def ready(gateway: Here) -> Response:
    """200 only while a generation can pass through every stage of some pipeline, with what is there for each model."""
    try:
        found = await _pipelines(gateway)
    except Unavailable as error:
        return json_response({"ready": False, "reason": str(error), "models": {}}, status=503)
    names = sorted({pipeline.model for pipeline in found})
    models = {name: _readiness([one for one in found if one.model == name]) for name in names}
    is_ready = any(model["ready"] for model in models.values())
    return json_response({"ready": is_ready, "models": models}, status=200 if is_ready else 503)


@router.get("/v1/models")
async def list_models(gateway: Here, _caller: Reader) -> Response:
    """Every model that a stage has registered."""
    found = await _pipelines(gateway)
    models = [await gateway.catalogue.get(name) for name in await gateway.catalogue.names()]
    return json_response({"object": "list", "data": [_model(model, found) for model in models]})


@router.get("/v1/models/{name:path}")
async def get_model(name: str, gateway: Here, _caller: Reader) -> Response:
    """One of them."""
    return json_response(_model(await gateway.catalogue.get(name), await _pipelines(gateway)))


@router.get("/metrics")
async def metrics(gateway: Here, _caller: Admin) -> Response:
    """For Prometheus."""
    return Response(generate_latest(gateway.registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/openapi.json", include_in_schema=False)
async def description(request: Request, _caller: Reader) -> Response:
    """Of this API, for programs that read OpenAPI."""
    return json_response(request.app.openapi())


async def _pipelines(gateway: Gateway) -> list[LivePipeline]:
    with reachable():
        async with gateway.client.database.connect() as connection:
            return await connection.run_sync(live_pipelines)


def _readiness(pipelines: list[LivePipeline]) -> dict[str, Any]:
    return {
        "ready": any(pipeline.ready for pipeline in pipelines),
        "seats": sum(pipeline.seats for pipeline in pipelines if pipeline.ready),
        "pipelines": pipelines,
    }


def _model(model: Model, pipelines: list[LivePipeline]) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "shardline",
        "max_model_len": model.tokens.longest,
        "system_fingerprint": model.system_fingerprint,
        "ready": any(pipeline.ready for pipeline in pipelines if pipeline.model == model.name),
    }
