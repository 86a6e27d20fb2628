"""One real stack for tests of single faults: quick times, failpoints, producers at four doors,
tokens to compare."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count, cycle
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
from celery import Celery
from redis import Redis
from sqlalchemy import text

from shardline.client import Client
from shardline.contract.api_key import bearer
from shardline.contract.job import MAX_CRASHES, Job, JobState
from shardline.contract.keys import INTAKE
from shardline.contract.queues import INTAKE_QUEUE, SUBMIT_TASK
from shardline.store.connection.database import connect
from tests.chaos.load.workload import Workload, lab
from tests.polling import until
from tests.stack import ForkedStack, Stack, is_running

TIME_SCALE = "0.5"
"""Another stack may run beside it: see tests/conftest.py."""
STALL_S = "15"
NUM_REQUESTS = 8
MAX_TOKENS = 300
END_S = 420
HELD = (2, 3)
"""Requests that are held to a schema, of numbers without end: one greedy, one sampled."""
NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": MAX_TOKENS}
DOORS = ("python", "stream", "celery", "http")


def request(number: int, max_tokens: int = MAX_TOKENS) -> dict[str, Any]:
    """One of NUM_REQUESTS: half greedy, half sampled under their own seeds, two held to a schema;
    long enough for several heartbeats."""
    number %= NUM_REQUESTS
    held = {"structured_outputs": {"json": NUMBERS}} if number in HELD else {"ignore_eos": True}
    return {
        **held,
        "model": "clerk",
        "prompt": f"sort: {number}, 7, 30, 12 =",
        "max_tokens": max_tokens,
        "temperature": 0.8 if number % 2 else 0.0,
        "seed": number,
    }


def tokens_of(job: Job) -> tuple[int, ...]:
    """The output ids of a job that must have succeeded."""
    assert job.state is JobState.SUCCEEDED, (job.state, job.error)
    assert job.result is not None
    assert job.result.exact
    return tuple(job.result.token_ids)


@dataclass(slots=True, kw_only=True)
class Hurt:
    """The stack as faults see it."""

    stack: Stack
    failpoints: Path
    num_stages: int = 2
    workload: Workload = field(default_factory=lab)

    @property
    def urls(self) -> Mapping[str, str]:
        """Where its doors and servers are."""
        return self.stack.urls

    def pid(self, name: str) -> int:
        """Of a process that lives; waits for one that is being started again."""
        until(lambda: is_running(self.stack.look()["processes"].get(name)))
        return int(self.stack.look()["processes"][name])

    def pick(self, rng: random.Random, prefix: str) -> tuple[str, int]:  # noqa: ARG002 (protocol)
        """There is one process of each name."""
        return prefix, self.pid(prefix)

    def client(self) -> Client:
        """At Postgres and Redis."""
        return Client(database_url=self.urls["database"], redis_url=self.urls["redis"])

    def count(self, query: str, ids: Sequence[UUID]) -> int:
        """The number that `query` gives for these jobs."""
        engine = connect(self.urls["database"])
        try:
            with engine.connect() as connection:
                return int(connection.execute(text(query), {"ids": list(ids)}).scalar_one())
        finally:
            engine.dispose()

    def undisturbed(self, max_tokens: int) -> list[tuple[int, ...]]:
        """The tokens of every request while nobody dies."""
        with self.client() as client:
            ids = client.submit_many(
                [request(number, max_tokens) for number in range(NUM_REQUESTS)]
            )
            return [tokens_of(job) for job in client.wait(ids, timeout_s=END_S)]


@contextmanager
def small_stack(**settings: str) -> Iterator[Hurt]:
    """Two stages; nothing of it is left at the end."""
    folder = Path(tempfile.mkdtemp(prefix="shardline-small-"))
    failpoints = folder / "failpoints"
    failpoints.mkdir()
    stack = ForkedStack(
        folder,
        SHARDLINE_TIME_SCALE=TIME_SCALE,
        SHARDLINE_STALL_S=STALL_S,
        SHARDLINE_MAX_CRASHES=str(MAX_CRASHES),
        SHARDLINE_FAILPOINTS=str(failpoints),
        **settings,
    )
    try:
        stack.start()
        yield Hurt(stack=stack, failpoints=failpoints)
    finally:
        stack.end()
    assert stack.left() == []
    shutil.rmtree(folder, ignore_errors=True)


class Producer:
    """At every door in turn; ids are its own, so that a repeat is harmless."""

    def __init__(self, urls: Mapping[str, str], max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._gateway = urls["gateway"]
        self._api_key = urls["api_key"]
        self._client = Client(database_url=urls["database"], redis_url=urls["redis"])
        self._redis = Redis.from_url(urls["redis"])
        self._celery = Celery(broker=urls["redis"], set_as_current=False)
        self._turns = zip(cycle(DOORS), count(), strict=False)
        self.asked: dict[UUID, int] = {}
        """Job and the number of its request."""

    def close(self) -> None:
        """Give back the connections."""
        self._client.close()
        self._redis.close()
        self._celery.close()

    def ask(self) -> UUID:
        """One job more, through the next door."""
        door, turn = next(self._turns)
        number = (turn // len(DOORS)) % NUM_REQUESTS
        sends: Mapping[str, Callable[[UUID, dict[str, Any]], None]] = {
            "python": self._by_python,
            "stream": self._by_stream,
            "celery": self._by_celery,
            "http": self._by_http,
        }
        job_id = uuid4()
        sends[door](job_id, request(number, self._max_tokens))
        self.asked[job_id] = number
        return job_id

    def num_open(self) -> int:
        """Jobs asked for that have not ended."""
        return len(self.asked) - sum(
            job.state.terminal for job in self._client.get_many(list(self.asked))
        )

    def ended(self) -> dict[UUID, Job]:
        """All of them, ended: also those whose rows are still to be made."""
        ids = list(self.asked)
        until(lambda: len(self._client.get_many(ids)) == len(ids))
        return {job.id: job for job in self._client.wait(ids, timeout_s=END_S, must_succeed=False)}

    def _by_python(self, job_id: UUID, request: dict[str, Any]) -> None:
        self._client.submit_many([{**request, "id": str(job_id)}])

    def _by_stream(self, job_id: UUID, request: dict[str, Any]) -> None:
        self._redis.xadd(INTAKE, {"request": json.dumps({**request, "id": str(job_id)})})

    def _by_celery(self, job_id: UUID, request: dict[str, Any]) -> None:
        self._celery.send_task(SUBMIT_TASK, kwargs=request, task_id=str(job_id), queue=INTAKE_QUEUE)

    def _by_http(self, job_id: UUID, request: dict[str, Any]) -> None:
        """A gateway that dies under the request is asked again, as every caller should."""

        def is_taken() -> bool:
            with suppress(httpx.TransportError):
                body = {**request, "id": str(job_id)}
                url = f"{self._gateway}/v1/jobs"
                key = bearer(self._api_key)
                return httpx.post(url, json=body, headers=key, timeout=10).is_success
            return False

        until(is_taken)
