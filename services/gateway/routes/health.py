"""Routes for operators and clients: liveness, readiness, models, metrics and the API description.
Knows no job."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from services.gateway.bodies import (
    Health,
    ModelCard,
    ModelList,
    ModelReadiness,
    Readiness,
    Version,
)
from services.gateway.context import GatewayDep
from services.gateway.errors import json_response
from services.gateway.guard import SCHEME, AdminCaller, ReadCaller
from services.gateway.openai.system_fingerprint import system_fingerprint
from services.gateway.schemas import GUARDED, TEXT, Content, answer, errors
from shardline import __version__
from shardline.base.errors import Unavailable
from shardline.store.pipelines import LivePipeline
from shardline_server.tokenize import RegisteredModel

router = APIRouter(tags=["operating"], default_response_class=Response)


@router.get("/health", responses={200: answer("This process answers", Health)})
async def health() -> Response:
    """Whether this process answers. Reports nothing about the others."""
    return json_response(Health(status="ok"))


@router.get(
    "/ready",
    responses={
        200: answer("A pipeline can generate", Readiness),
        503: answer("No pipeline can generate", Readiness),
        **errors(401, 421, 429),
    },
    openapi_extra={"security": [{}, {SCHEME.scheme_name: []}]},
)
async def ready(request: Request, gateway: GatewayDep) -> Response:
    """200 only while a generation can pass through every stage of some pipeline. A caller with an
    API key, of any scope, learns what is there for each model."""
    visitor = None
    try:
        visitor = await gateway.guard.visitor(request.headers)
        found = await gateway.client.pipelines()
    except Unavailable as error:
        reason = UNSET if visitor is None else error.problem
        return json_response(Readiness(ready=False, reason=reason), status=503)
    is_ready = any(pipeline.ready for pipeline in found)
    models: dict[str, ModelReadiness] | UnsetType = UNSET
    if visitor is not None:
        names = sorted({pipeline.model for pipeline in found})
        models = {name: _readiness([one for one in found if one.model == name]) for name in names}
    return json_response(Readiness(ready=is_ready, models=models), status=200 if is_ready else 503)


@router.get(
    "/v1/models", responses={200: answer("All registered models", ModelList), **errors(*GUARDED)}
)
async def list_models(gateway: GatewayDep, _caller: ReadCaller) -> Response:
    """Every model that a stage has registered, and its adapters."""
    found = await gateway.client.pipelines()
    models = await gateway.catalog.readable()
    cards = [_model(model, found) for model in models]
    first_id, last_id = (cards[0].id, cards[-1].id) if cards else (None, None)
    return json_response(ModelList(data=cards, first_id=first_id, last_id=last_id))


@router.get(
    "/v1/models/{name:path}",
    responses={200: answer("The model", ModelCard), **errors(*GUARDED, 404)},
)
async def get_model(name: str, gateway: GatewayDep, _caller: ReadCaller) -> Response:
    """One registered model, or one of its adapters."""
    return json_response(_model(await gateway.catalog.get(name), await gateway.client.pipelines()))


@router.get(
    "/metrics",
    responses={
        200: answer("In Prometheus's text format", Content(media=TEXT, schema={"type": "string"})),
        **errors(*GUARDED),
    },
)
async def metrics(gateway: GatewayDep, _caller: AdminCaller) -> Response:
    """Metrics in Prometheus's text format."""
    return Response(generate_latest(gateway.registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/version", responses={200: answer("Shardline's version", Version), **errors(*GUARDED)})
async def version(_caller: ReadCaller) -> Response:
    """The version of this gateway."""
    return json_response(Version(version=__version__))


@router.get(
    "/openapi.json",
    responses={200: answer("OpenAPI 3.1", Content(schema={"type": "object"})), **errors(*GUARDED)},
)
async def description(request: Request, _caller: ReadCaller) -> Response:
    """The OpenAPI description of this API."""
    return json_response(request.app.openapi())


def _readiness(pipelines: list[LivePipeline]) -> ModelReadiness:
    return ModelReadiness(
        ready=any(pipeline.ready for pipeline in pipelines),
        seats=sum(pipeline.seats for pipeline in pipelines if pipeline.ready),
        pipelines=pipelines,
    )


def _model(model: RegisteredModel, pipelines: list[LivePipeline]) -> ModelCard:
    return ModelCard(
        id=model.address,
        display_name=model.address,
        created=int(model.updated_at.timestamp()),
        created_at=model.updated_at,
        owned_by="shardline",
        root=model.name,
        parent=None if model.adapter is None else model.name,
        max_model_len=model.tokens.longest,
        task=model.tokens.task,
        system_fingerprint=system_fingerprint(model),
        ready=any(pipeline.ready for pipeline in pipelines if pipeline.model == model.name),
    )
