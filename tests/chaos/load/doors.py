"""The five doors as producers use them, under an id of the producer's own or under a key. Knows
addresses, not what follows.

Each function returns what the door answers (docs/doors.md); it raises Conflict when the door
refuses a repeat, and one of AWAY when the answer is missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from uuid import UUID, uuid4

import httpx
import psycopg
import redis
from celery import Celery
from kombu.exceptions import KombuError

from shardline.base.config import Settings
from shardline.base.errors import Conflict, Invalid, ShardlineError
from shardline.client import Client
from shardline.contract import keys
from shardline.contract.api_key import bearer
from shardline.contract.queues import INTAKE_QUEUE, SUBMIT_TASK, celery_settings
from tests.chaos.load.requests import INSERT, Request, row

PATIENCE_S = 5.0
AWAY = (httpx.HTTPError, psycopg.Error, redis.RedisError, KombuError, ShardlineError, OSError)
"""What a producer meets while a server is away: whether the job is stored is unknown, so it asks
again."""

BUSY = (408, 429, 503)
"""Come again."""

THERE = "SELECT id FROM jobs WHERE id = %(id)s OR idempotency_key = %(idempotency_key)s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a door says of a request."""

    job_id: UUID | None = None
    """The job is accepted, under this id. None: it is only taken."""
    is_new: bool | None = None
    """Whether the door says that it was not there before; None: it does not say."""


TAKEN = Answer()

Door = Callable[[UUID | None, Request], Answer]
"""With the id that the producer wants, if any."""


def by_client(urls: Mapping[str, str]) -> Door:
    """`shardline.Client`, one for all requests as programs do."""
    client = Client(database_url=urls["database"], redis_url=urls["redis"])

    def submit(job_id: UUID | None, request: Request) -> Answer:
        return Answer(job_id=client.submit(**{**request, "id": job_id}))

    return submit


def by_celery(urls: Mapping[str, str]) -> Door:
    """`send_task`: Redis has it; the row comes later."""
    app = Celery("producer", set_as_current=False)
    app.conf.update(celery_settings(Settings(redis_url=urls["redis"])))
    app.conf.broker_transport_options = {
        **app.conf.broker_transport_options,
        "socket_timeout": PATIENCE_S,
    }

    def submit(job_id: UUID | None, request: Request) -> Answer:
        task_id = str(job_id or uuid4())
        app.send_task(
            SUBMIT_TASK, kwargs=dict(request), task_id=task_id, queue=INTAKE_QUEUE, retry=False
        )
        return TAKEN

    return submit


def by_stream(urls: Mapping[str, str]) -> Door:
    """`XADD`: Redis has it; the row comes later."""
    client = redis.Redis.from_url(
        urls["redis"], socket_timeout=PATIENCE_S, socket_connect_timeout=PATIENCE_S
    )

    def submit(job_id: UUID | None, request: Request) -> Answer:
        client.xadd(keys.INTAKE, {"request": json.dumps({**request, **_own(job_id)})})
        return TAKEN

    return submit


def by_sql(urls: Mapping[str, str]) -> Door:
    """A producer's own transaction, repeatable under the same id or key."""

    def submit(job_id: UUID | None, request: Request) -> Answer:
        values = row(request, job_id)
        with psycopg.connect(
            urls["database"], connect_timeout=int(PATIENCE_S), options="-c statement_timeout=10000"
        ) as connection:
            connection.execute(f"{INSERT} ON CONFLICT DO NOTHING", values)
            ((there,),) = connection.execute(THERE, values).fetchall()
        return Answer(job_id=there)

    return submit


def by_http(urls: Mapping[str, str]) -> Door:
    """`POST /v1/jobs`: accepted when it says so. A key travels in the header."""
    client = gateway_client(urls, PATIENCE_S)

    def submit(job_id: UUID | None, request: Request) -> Answer:
        body, headers = with_header({**request, **_own(job_id)})
        answer = client.post("/v1/jobs", json=body, headers=headers)
        if answer.status_code == httpx.codes.CONFLICT:
            raise Conflict(answer.text[:300])
        answer.raise_for_status()
        return Answer(
            job_id=UUID(answer.json()["id"]), is_new=answer.status_code == httpx.codes.ACCEPTED
        )

    return submit


def gateway_client(urls: Mapping[str, str], timeout_s: float) -> httpx.Client:
    """With the stack's own key."""
    return httpx.Client(
        base_url=urls["gateway"], headers=bearer(urls["api_key"]), timeout=timeout_s
    )


def with_header(request: Request) -> tuple[Request, Mapping[str, str]]:
    """A body without the key, and the key as HTTP callers send it."""
    key = request.get("idempotency_key")
    body = {name: value for name, value in request.items() if name != "idempotency_key"}
    return body, {} if key is None else {"Idempotency-Key": key}


def is_refusal(error: Exception) -> bool:
    """Not away, not busy: the door says that the request is wrong, or that it has an error
    itself."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code not in BUSY
    return isinstance(error, Invalid)


def told_by(error: Exception) -> str:
    """What a door said, whole."""
    said = error.response.text if isinstance(error, httpx.HTTPStatusError) else ""
    return f"{error} {said}".strip()


def _own(job_id: UUID | None) -> Mapping[str, str]:
    return {} if job_id is None else {"id": str(job_id)}


DOORS: Mapping[str, Callable[[Mapping[str, str]], Door]] = MappingProxyType(
    {"client": by_client, "celery": by_celery, "redis": by_stream, "sql": by_sql, "http": by_http}
)
