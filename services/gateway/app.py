"""The application: routes, errors, admission and metrics in one. Knows no job."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway import errors
from services.gateway.admission import Gate
from services.gateway.anthropic.error_form import ErrorFormMiddleware
from services.gateway.batches.batch_keeper import BatchKeeper
from services.gateway.context import Gateway
from services.gateway.http.answers import AnswerSender
from services.gateway.http.request_middleware import REJOINED, STREAMED, RequestMiddleware
from services.gateway.routes import (
    audit,
    batches,
    bulk_acts,
    completions,
    costs,
    decisions,
    encoders,
    files,
    health,
    jobs,
    messages,
    pauses,
    responses,
    schedules,
    stored_completions,
    tokens,
    webhooks,
)
from services.gateway.schemas import DocumentedApp
from services.gateway.settings import GatewaySettings
from shardline import __version__
from shardline.base.errors import ShardlineError
from shardline.base.type_info import prepare_loaded

ADMITTED = ("/v1/", "/v2/", *tokens.PATHS, *encoders.PATHS)
"""Health checks and metrics bypass admission."""

RESPONSES = "/v1/responses/"

CROSS_ORIGIN: dict[str, Any] = {
    "allow_methods": ["GET", "HEAD", "POST", "DELETE"],
    "allow_headers": ["*"],
    "expose_headers": [
        *("x-request-id", "request-id", "retry-after", "retry-after-ms", "location"),
        "x-should-retry",
    ],
    "max_age": 3600,
    # Origins are the operator's list: theirs may be public, and this server in a private network.
    "allow_private_network": True,
}
"""What pages of allowed origins may send and read. Without cookies: a key travels in a header."""


def create_app(settings: GatewaySettings) -> FastAPI:
    """The application of one gateway, which connects when it starts."""
    prepare_loaded()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        gateway = Gateway.make(settings)
        app.state.gateway = gateway
        gateway.start()
        keeper = BatchKeeper(gateway)
        keeper.start()
        try:
            yield
        finally:
            await keeper.close()
            await gateway.close()

    # The API description is our own route, which requires a key: FastAPI's page for browsers could
    # not send one.
    app = DocumentedApp(title="Shardline", version=__version__, lifespan=lifespan, openapi_url=None)
    errors.install(app)
    # In this order they are looked through for each request: first those that take jobs. Not
    # included: FastAPI would match the routers too, and those that fit twice.
    for door in (
        completions,
        jobs,
        messages,
        responses,
        decisions,
        encoders,
        stored_completions,
        files,
        batches,
        webhooks,
        schedules,
        pauses,
        audit,
        bulk_acts,
        tokens,
        costs,
        health,
    ):
        app.router.routes.extend(door.router.routes)
    # The last one is the outermost: a page's question is answered without a key, and every answer
    # has an id.
    app.add_middleware(AdmissionMiddleware)
    if origins := settings.allowed_origins():
        app.add_middleware(CORSMiddleware, allow_origins=origins, **CROSS_ORIGIN)
    app.add_middleware(RequestMiddleware)
    app.add_middleware(ErrorFormMiddleware)
    return app


def _gate(gateway: Gateway, scope: Scope) -> Gate | None:
    """The limit for a path. Followers stay long and cost little, so neither kind may exhaust the
    other's limit."""
    path = scope["path"]
    if not path.startswith(ADMITTED):
        return None
    is_rejoined = path.startswith(RESPONSES) and REJOINED in scope["query_string"]
    is_followed = path.endswith(STREAMED) or is_rejoined
    return gateway.admission.followers if is_followed else gateway.admission.requests


class AdmissionMiddleware:
    """Admits, authenticates, times and counts every request, until the last byte of its answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request as plain ASGI, so that a streamed answer passes through untouched."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        gateway: Gateway = scope["app"].state.gateway
        await self._count(gateway, scope, receive, send)

    async def _count(self, gateway: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
        began_s = time.monotonic()
        status = "none"
        sender = AnswerSender(gateway.unsent, scope, receive, send)

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await sender(message)

        try:
            await self._guarded(gateway, scope, receive, noting)
        except asyncio.CancelledError:
            # The drain time is over. A caller without an answer must be able to tell that from a
            # failure.
            if status == "none":
                await errors.respond(errors.Stopping())(scope, receive, noting)
            raise
        finally:
            sender.close()
            # The template, not the path: paths are endless, labels must not be.
            route = getattr(scope.get("route"), "path", "unknown")
            gateway.metrics.requests.labels(route, scope["method"], status).inc()
            gateway.metrics.seconds.labels(route).observe(time.monotonic() - began_s)

    async def _guarded(self, gateway: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
        """Authenticate before routing: a route without a rule, and a path without a route, still
        require a key. Only who has one takes a place."""
        gate = _gate(gateway, scope)
        with ExitStack() as held:
            try:
                caller = await gateway.guard.admit(scope["path"], Headers(scope=scope))
                if gate is not None and caller is not None:
                    held.enter_context(gate.place(caller.tenant))
            except ShardlineError as error:
                gateway.metrics.refused.labels(errors.body_of(error).error.code).inc()
                await errors.respond(error)(scope, receive, send)
                return
            if caller is None:
                await gateway.admission.pace.wait()
            scope.setdefault("state", {}).update(caller=caller, held=held)
            await self._app(scope, receive, send)
