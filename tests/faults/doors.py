"""The five doors as producers use them, each under an id of the producer's own. Knows addresses, not what follows.

Each function returns whether the door has promised the job (docs/doors.md); it raises when the answer is missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any
from uuid import UUID

import httpx
import psycopg
import redis
from celery import Celery
from kombu.exceptions import KombuError

from shardline import keys
from shardline.api_key import bearer
from shardline.client import Client
from shardline.config import Settings
from shardline.errors import ShardlineError
from shardline.queues import INTAKE_QUEUE, SUBMIT_TASK, celery_settings
from tests.faults.requests import columns

PATIENCE_S = 5.0
INSERT = """
INSERT INTO jobs (id, model, prompt, params, max_crashes) VALUES (%s, %s, %s, %s, %s) ON CONFLICT (id) DO NOTHING
"""
AWAY = (httpx.HTTPError, psycopg.Error, redis.RedisError, KombuError, ShardlineError, OSError)
"""What a producer meets while a server is away: whether the job is stored is unknown, so it asks again."""

Request = Mapping[str, Any]
Door = Callable[[UUID, Request], bool]


def by_client(urls: Mapping[str, str]) -> Door:
    """`shardline.Client`, one for all requests as programs do."""
    client = Client(database_url=urls["database"], redis_url=urls["redis"])

    def submit(job_id: UUID, request: Request) -> bool:
        client.submit(**{**request, "id": job_id})
        return True

    return submit


def by_celery(urls: Mapping[str, str]) -> Door:
    """`send_task`: Redis has it; the row comes later."""
    app = Celery("producer", set_as_current=False)
    app.conf.update(celery_settings(Settings(redis_url=urls["redis"])))
    app.conf.broker_transport_options = {**app.conf.broker_transport_options, "socket_timeout": PATIENCE_S}

    def submit(job_id: UUID, request: Request) -> bool:
        app.send_task(SUBMIT_TASK, kwargs=dict(request), task_id=str(job_id), queue=INTAKE_QUEUE, retry=False)
        return False

    return submit


def by_stream(urls: Mapping[str, str]) -> Door:
    """`XADD`: Redis has it; the row comes later."""
    client = redis.Redis.from_url(urls["redis"], socket_timeout=PATIENCE_S, socket_connect_timeout=PATIENCE_S)

    def submit(job_id: UUID, request: Request) -> bool:
        client.xadd(keys.INTAKE, {"request": json.dumps({**request, "id": str(job_id)})})
        return False

    return submit


def by_sql(urls: Mapping[str, str]) -> Door:
    """A producer's own transaction, repeatable under the same id."""

    def submit(job_id: UUID, request: Request) -> bool:
        with psycopg.connect(
            urls["database"], connect_timeout=int(PATIENCE_S), options="-c statement_timeout=10000"
        ) as connection:
            connection.execute(INSERT, (job_id, *columns(request)))
        return True

    return submit


def by_http(urls: Mapping[str, str]) -> Door:
    """`POST /v1/jobs`: accepted when it says so."""
    client = httpx.Client(base_url=urls["gateway"], headers=bearer(urls["api_key"]), timeout=PATIENCE_S)

    def submit(job_id: UUID, request: Request) -> bool:
        client.post("/v1/jobs", json={**request, "id": str(job_id)}).raise_for_status()
        return True

    return submit


DOORS: Mapping[str, Callable[[Mapping[str, str]], Door]] = MappingProxyType(
    {"client": by_client, "celery": by_celery, "redis": by_stream, "sql": by_sql, "http": by_http}
)
