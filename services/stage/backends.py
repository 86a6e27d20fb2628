"""What a stage uses outside its own process: Postgres, Redis, Celery's result backend, its
supervisor.

Owns the Protocol and the servers behind it; knows no part of a stage.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

from sqlalchemy import Engine as Database

from services.stage.jobs.delta_publisher import DeltaSink
from services.stage.jobs.result_publisher import StoreResult
from services.stage.pipeline.registry import RedisRegistry, Registry
from services.stage.settings import StageSettings
from shardline.store.connection.database import connect
from shardline.streams import DeltaWriter
from shardline_server.celery_results import keeps_results, results_app, store_end
from shardline_server.host.threads import die


class Backends(Protocol):
    """Nothing connects before it is used first."""

    def open_database(self, application_name: str) -> Database:
        """Postgres. Heads alone talk to it."""

    def open_registry(self) -> Registry:
        """The cards of all stages."""

    def open_delta_sink(self) -> DeltaSink:
        """The streams of jobs; heads alone write them."""

    def result_store(self) -> StoreResult | None:
        """Celery's result backend; None without one."""

    def exit(self, reason: str) -> None:
        """Ends this process at once with a non-zero status: its supervisor starts it again."""


class ServerBackends:
    """The servers that the settings name."""

    def __init__(self, settings: StageSettings) -> None:
        self._settings = settings

    def open_database(self, application_name: str) -> Database:
        """A pool of connections to Postgres."""
        return connect(
            self._settings.database_url.get_secret_value(), application_name=application_name
        )

    def open_registry(self) -> Registry:
        """Cards in Redis."""
        return RedisRegistry(self._settings.redis_url)

    def open_delta_sink(self) -> DeltaSink:
        """Streams in Redis."""
        return DeltaWriter(self._settings.redis_url)

    def result_store(self) -> StoreResult | None:
        """Returns the store of a separate app: the worker's stores nothing."""
        if not keeps_results(self._settings):
            return None
        return partial(store_end, results_app(self._settings, "shardline.results"))

    def exit(self, reason: str) -> None:
        """Leaves with the status of a process that cannot go on."""
        die(reason)
