"""The five ways to submit a job, each as a producer would write it. Knows addresses, not what
happens next.

Every door takes an id that the producer chose, so that a repeat inserts nothing and the producer
can ask for it later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import httpx
import msgspec
from celery import Celery

from shardline.base.config import Settings
from shardline.base.redis import redis_client
from shardline.client import Client
from shardline.contract import keys
from shardline.contract.api_key import bearer
from shardline.contract.ids import new_id
from shardline.contract.job import JobRequest
from shardline.contract.queues import INTAKE_QUEUE, SUBMIT_TASK, celery_settings
from shardline.store.connection.database import transaction
from shardline.store.inserts import insert_plainly

MAX_TOKENS = 128
TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Producer:
    """A producer of prompts for one model, with the addresses of a stack (`urls` of up.json) and
    its `api_key`."""

    urls: Mapping[str, str]
    api_key: str
    model: str

    def requests(self, prompts: Sequence[str]) -> list[JobRequest]:
        """Greedy completions: their answers are known."""
        return [
            JobRequest(
                id=new_id(), model=self.model, prompt=prompt, temperature=0.0, max_tokens=MAX_TOKENS
            )
            for prompt in prompts
        ]


def by_client(producer: Producer, requests: Sequence[JobRequest]) -> None:
    """Submit from Python: accepted when the call returns."""
    with Client(database_url=producer.urls["database"], redis_url=producer.urls["redis"]) as client:
        client.submit_many(requests)


def by_celery(producer: Producer, requests: Sequence[JobRequest]) -> None:
    """Submit from any service that has Celery: accepted when a relay has taken the task."""
    app = Celery("producer", set_as_current=False)
    app.conf.update(celery_settings(Settings(redis_url=producer.urls["redis"])))
    with app.connection_for_write() as connection:
        for request in requests:
            app.send_task(
                SUBMIT_TASK,
                kwargs=_document(request),
                task_id=str(request.id),
                queue=INTAKE_QUEUE,
                connection=connection,
            )


def by_stream(producer: Producer, requests: Sequence[JobRequest]) -> None:
    """Submit from any language that speaks Redis: accepted when a relay has read the entry."""
    with redis_client(producer.urls["redis"], timeout_s=TIMEOUT_S) as client:
        for request in requests:
            client.xadd(keys.INTAKE, {"request": msgspec.json.encode(request)})


def by_sql(producer: Producer, requests: Sequence[JobRequest]) -> None:
    """Submit from any language that speaks Postgres: accepted when the producer's own transaction
    commits."""
    with transaction(producer.urls["database"]) as connection:
        insert_plainly(connection, requests)


def by_http(producer: Producer, requests: Sequence[JobRequest]) -> None:
    """Submit over HTTP: accepted when the answer has arrived."""
    with httpx.Client(
        base_url=producer.urls["gateway"],
        headers=bearer(producer.api_key),
        timeout=30.0,
        trust_env=False,
    ) as client:
        for request in requests:
            client.post("/v1/jobs", json=_document(request)).raise_for_status()


SubmitFunction = Callable[[Producer, Sequence[JobRequest]], None]

DOORS: Mapping[str, SubmitFunction] = {
    "client": by_client,
    "celery": by_celery,
    "redis": by_stream,
    "sql": by_sql,
    "http": by_http,
}


def submit(producer: Producer, door: str, prompts: Sequence[str]) -> list[UUID]:
    """Push the prompts through one door; returns their ids in order."""
    requests = producer.requests(prompts)
    DOORS[door](producer, requests)
    return [request.id for request in requests if request.id is not None]


def _document(request: JobRequest) -> dict[str, object]:
    """The request as JSON-like data."""
    document: dict[str, object] = msgspec.to_builtins(request)
    return document
