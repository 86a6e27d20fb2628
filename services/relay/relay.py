"""The relay's parts, made and joined once. Knows no Celery worker: `app` starts and stops it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable
from typing import Any
from uuid import UUID, uuid5

import structlog
from celery import Celery
from prometheus_client import CollectorRegistry
from tenacity import Retrying, retry_if_exception_type, sleep_using_event, stop_when_event_set, wait_random_exponential

from services.relay.acceptance import CONFLICT, Arrival, Verdict, accept
from services.relay.canceller import Canceller
from services.relay.census import Census
from services.relay.dead_letters import bury
from services.relay.doorbell import Doorbell
from services.relay.growth import Growth
from services.relay.intake import ENTRY_IDS, Intake
from services.relay.loop import MAX_BACKOFF_S, POSTGRES_ERRORS, REDIS_ERRORS, Loop
from services.relay.outbox import Outbox
from services.relay.preparer import Preparer
from services.relay.results import Results
from services.relay.retention import Retention
from services.relay.settings import RelaySettings
from services.relay.sweeper import Sweeper
from shardline import metrics
from shardline.errors import Invalid
from shardline.failpoints import Point, failpoint
from shardline.ids import parse_id
from shardline.job import JobState
from shardline.metrics import RelayMetrics
from shardline.redis import redis_client
from shardline.store.database import connect

log = structlog.get_logger(__name__)

REDIS_TIMEOUT_S = 2.0
NUM_LOOPS = 8
"""Connections of the pool that the loops may hold at once: one for each of the eight that read or write rows. The
doorbell's is its own."""

JOIN_S = 10.0
"""For all loops together; one that hangs in a frozen server is left behind, its transaction is undone."""


class Relay:
    """All loops of one relay, and the two things that its Celery worker asks of it."""

    def __init__(self, settings: RelaySettings) -> None:
        self._settings = settings
        self._registry = CollectorRegistry()
        self._metrics = RelayMetrics(self._registry)
        url = settings.database_url.get_secret_value()
        self._database = connect(url, application_name="shardline-relay", pool_size=settings.concurrency + NUM_LOOPS)
        self._redis = redis_client(settings.redis_url, timeout_s=REDIS_TIMEOUT_S)
        self._closing = threading.Event()
        parts: dict[str, Any] = {"database": self._database, "times": settings.times, "metrics": self._metrics}
        publisher = _publisher(settings)
        self._results = Results(
            backend_app=publisher if settings.result_backend else None, times=settings.times, metrics=self._metrics
        )
        outbox = Outbox(publisher=publisher, redis=self._redis, **parts)
        preparer = Preparer(outbox=outbox, results=self._results, **parts)
        blocking = redis_client(settings.redis_url, timeout_s=settings.times.poll_s + REDIS_TIMEOUT_S)
        self._canceller = Canceller(results=self._results, **parts)
        self._loops: tuple[Loop, ...] = (
            outbox,
            preparer,
            Sweeper(results=self._results, **parts),
            Census(**parts),
            self._canceller,
            self._results,
            Intake(redis=blocking, batch=settings.intake_batch, **parts),
            Growth(keeps_all=settings.retention_days is None, **parts),
            Doorbell(database_url=url, wakes=(outbox, preparer), times=settings.times, metrics=self._metrics),
        )
        if settings.retention_days is not None:
            self._loops += (Retention(days=settings.retention_days, **parts),)

    def start(self) -> None:
        """Begin to work."""
        if self._settings.metrics_port is not None:
            metrics.serve(self._settings.metrics_port, self._registry)
        for loop in self._loops:
            loop.start()

    def close(self) -> None:
        """Submissions that wait for Postgres give up: their messages go back."""
        self._closing.set()

    def stop(self) -> None:
        """End every loop after its turn. What was not done is found by the next relay."""
        self.close()
        for loop in self._loops:
            loop.stop()
        deadline_s = time.monotonic() + JOIN_S
        for loop in self._loops:
            loop.join(max(0.0, deadline_s - time.monotonic()))
        self._database.dispose()

    def submit(self, task_id: str, document: dict[str, Any]) -> Verdict:
        """The Celery door: committed when this returns. Raises RetryError when the relay closes while a server is
        away."""
        patient = Retrying(
            retry=retry_if_exception_type((*POSTGRES_ERRORS, *REDIS_ERRORS)),
            wait=wait_random_exponential(multiplier=0.1, max=MAX_BACKOFF_S),
            stop=stop_when_event_set(self._closing),
            sleep=sleep_using_event(self._closing),
        )
        return patient(self._submit, task_id, document)

    def cancel(self, task_ids: Iterable[str], *, running: bool) -> int:
        """Celery's revoke: soon. Ids that are no job's are passed over."""
        ids = [job_id for task_id in task_ids if (job_id := _uuid(task_id)) is not None]
        self._canceller.cancel(ids, running=running)
        return len(ids)

    def _submit(self, task_id: str, document: dict[str, Any]) -> Verdict:
        job_id = _uuid(task_id) or uuid5(ENTRY_IDS, task_id)
        (verdict,) = accept(self._database, [Arrival(id=job_id, document=document)])
        failpoint(Point.INTAKE_INSERTED, door="celery")
        if verdict.fate == "dead":
            bury(self._redis, entry=task_id, request=json.dumps(document, default=str), reason=verdict.reason)
        if verdict.reason is not None and verdict.reason["code"] != CONFLICT:
            self._results.note({job_id: JobState.FAILED}, json.dumps(verdict.reason))
        self._metrics.intake.labels(outcome=verdict.fate).inc()
        return verdict


def _uuid(text: str) -> UUID | None:
    try:
        return parse_id(text)
    except Invalid:
        return None


def _publisher(settings: RelaySettings) -> Celery:
    """An app for sending only: its connections must not block for long, the worker's must."""
    app = Celery("shardline.outbox", set_as_current=False)
    app.conf.update(settings.celery())
    app.conf.broker_transport_options["socket_timeout"] = REDIS_TIMEOUT_S
    app.conf.broker_transport_options["socket_connect_timeout"] = REDIS_TIMEOUT_S
    app.conf.redis_socket_timeout = app.conf.redis_socket_connect_timeout = REDIS_TIMEOUT_S
    return app
