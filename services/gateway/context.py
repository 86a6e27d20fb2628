"""What all routes of one gateway process share. Owns its construction and its shutdown; knows no
route."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from prometheus_client import CollectorRegistry

from services.gateway.admission import Admission
from services.gateway.catalog import ModelCatalog
from services.gateway.client import GatewayClient
from services.gateway.grammar_turns import GrammarTurns
from services.gateway.guard import Guard, allowed_hosts
from services.gateway.http.answers import UnsentAnswers
from services.gateway.insert_batcher import InsertBatcher
from services.gateway.keyring import Keyring
from services.gateway.settings import GatewaySettings
from shardline_server.metrics import GatewayMetrics, serve
from shardline_server.tracing import Tracer


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """Made once for each process, before the first request."""

    settings: GatewaySettings
    client: GatewayClient
    catalog: ModelCatalog
    insert_batcher: InsertBatcher
    grammar_turns: GrammarTurns
    admission: Admission
    unsent: UnsentAnswers
    keyring: Keyring
    guard: Guard
    metrics: GatewayMetrics
    registry: CollectorRegistry
    tracer: Tracer
    batches_due: asyncio.Event
    """Set when a batch was made or cancelled here."""
    stopping: asyncio.Event
    """Set when the drain time is over: requests that still wait get 503."""

    @classmethod
    def make(cls, settings: GatewaySettings) -> Gateway:
        """Build a gateway, which connects to nothing yet."""
        registry = CollectorRegistry()
        metrics = GatewayMetrics(registry)
        hosts = allowed_hosts(settings.http_allowed_hosts, settings.http_host)
        client = GatewayClient(
            database_url=settings.database_url.get_secret_value(), redis_url=settings.redis_url
        )
        keyring = Keyring(client.database, fresh_s=settings.http_key_fresh_s)
        return cls(
            settings=settings,
            client=client,
            catalog=ModelCatalog(client.database),
            insert_batcher=InsertBatcher(client, metrics),
            grammar_turns=GrammarTurns(),
            admission=Admission(
                max_in_flight=settings.http_max_in_flight,
                max_followers=settings.http_max_followers,
                max_body_bytes=settings.http_max_body_bytes,
                max_buffered_bytes=settings.http_max_buffered_bytes,
                body_timeout_s=settings.http_body_timeout_s,
                gauge=metrics.in_flight,
                followers_gauge=metrics.followers,
            ),
            unsent=UnsentAnswers(settings.http_max_unsent_bytes),
            keyring=keyring,
            guard=Guard(keyring, hosts),
            metrics=metrics,
            registry=registry,
            tracer=Tracer.from_environment("gateway"),
            batches_due=asyncio.Event(),
            stopping=asyncio.Event(),
        )

    def start(self) -> None:
        """Start the background tasks."""
        if self.settings.metrics_port is not None:
            serve(self.settings.metrics_port, self.registry)
        self.insert_batcher.start()
        self.keyring.start()

    async def close(self) -> None:
        """Stop the tasks and close the connections. Jobs continue."""
        await self.insert_batcher.close()
        await self.keyring.close()
        await self.client.close()
        await asyncio.to_thread(self.tracer.close)


async def gateway_of(request: Request) -> Gateway:
    """The gateway that answers this request. A coroutine, because FastAPI calls a plain function on
    a thread."""
    gateway = request.app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway


GatewayDep = Annotated[Gateway, Depends(gateway_of)]
"""Type of a route's parameter that receives the gateway."""
