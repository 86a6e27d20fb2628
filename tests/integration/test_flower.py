"""Flower on a whole stack: every worker, every job under its id, Terminate and revoke that reach
rows and KV."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
import redis
from celery import Celery
from typer.testing import CliRunner, Result

from services.standalone.settings import CLERK
from shardline.base.config import Settings
from shardline.cli.commands import cli
from shardline.client import Client
from shardline.contract.job import JobState
from shardline.contract.queues import (
    GENERATE_TASK,
    INTAKE_QUEUE,
    SUBMIT_TASK,
    celery_settings,
    generate_queue,
)
from tests.polling import until
from tests.stack import ForkedStack, Stack

MODEL = "clerk"
LONG: dict[str, Any] = {
    "model": MODEL,
    "prompt": "sort: 3, 1, 2 =",
    "max_tokens": 20_000,
    "ignore_eos": True,
    "temperature": 0.8,
}
"""Runs for a minute and more unless it is stopped."""

CONTEXT = 32_768
NUM_WORKERS = 3


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """The demo model under a longer context: what it says there is nonsense, but it goes on saying
    it."""
    folder = Path(tempfile.mkdtemp(prefix="shardline-flower-"))
    model = shutil.copytree(CLERK, folder / MODEL)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    stack = ForkedStack(
        folder, SHARDLINE_MODEL=str(model), SHARDLINE_MODEL_NAME=MODEL, SHARDLINE_KV_MIB="256"
    )
    stack.start()
    yield stack
    stack.end()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def producer(stack: Stack) -> Celery:
    """Another service's Celery app: it knows task names and the broker, nothing more."""
    app = Celery("producer")
    app.conf.update(celery_settings(Settings(redis_url=stack.look()["urls"]["redis"])))
    return app


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    urls = stack.look()["urls"]
    with Client(database_url=urls["database"], redis_url=urls["redis"]) as client:
        yield client


class Flower:
    """Flower's API."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str) -> Any:
        """The JSON, or None while Flower knows nothing of it."""
        answer = httpx.get(f"{self.url}/api/{path}", timeout=60)
        return answer.json() if answer.status_code == 200 else None

    def state(self, job_id: UUID) -> str | None:
        """The task's state as Flower shows it."""
        task = self.get(f"task/info/{job_id}")
        return task and task["state"]

    def revoke(self, job_id: UUID, *, terminate: bool) -> None:
        """What its buttons do."""
        parameters = {"terminate": "true"} if terminate else {}
        httpx.post(
            f"{self.url}/api/task/revoke/{job_id}", params=parameters, timeout=10
        ).raise_for_status()


@pytest.fixture
def flower(stack: Stack) -> Flower:
    return Flower(stack.look()["urls"]["flower"])


def blocks_used(producer: Celery) -> list[int]:
    """Each stage's own counter; relays do not know the command."""
    answers = producer.control.inspect(timeout=5, limit=NUM_WORKERS)._request("stage") or {}
    return [answer["kv_blocks_used"] for answer in answers.values() if "kv_blocks_used" in answer]


def is_taken(stack: Stack) -> bool:
    """No message waits for a head."""
    with redis.Redis.from_url(stack.look()["urls"]["redis"]) as connection:
        return connection.keys(f"{generate_queue(MODEL)}*") == []


def state(client: Client, job_id: UUID) -> JobState:
    """The committed state."""
    return client.get(job_id).state


def test_flower_shows_every_worker_and_remote_control_answers(
    flower: Flower, producer: Celery
) -> None:
    until(lambda: len(flower.get("workers?refresh=1") or {}) == NUM_WORKERS)
    inspect = producer.control.inspect(timeout=5, limit=NUM_WORKERS)

    # Answers come by broadcast: a worker that is busy for a moment may miss one.
    until(lambda: len(inspect.ping() or {}) == NUM_WORKERS)
    until(lambda: len(inspect.active() or {}) == NUM_WORKERS)
    until(lambda: len(inspect.stats() or {}) == NUM_WORKERS)
    names = list(flower.get("workers"))
    until(
        lambda: all(name in httpx.get(f"{flower.url}/workers", timeout=60).text for name in names)
    )
    anybody = httpx.URL(flower.url).copy_with(username=None, password=None)
    assert httpx.get(anybody, timeout=60).status_code == 401


def test_terminating_a_celery_job_in_flower_frees_its_kv_on_every_stage(
    flower: Flower, producer: Celery, client: Client
) -> None:
    job_id = uuid4()
    producer.send_task(SUBMIT_TASK, kwargs=LONG, task_id=str(job_id), queue=INTAKE_QUEUE)
    until(lambda: flower.state(job_id) == "STARTED")
    until(lambda: min(blocks_used(producer), default=0) > 0)

    flower.revoke(job_id, terminate=True)

    until(lambda: state(client, job_id) is JobState.CANCELLED)
    until(lambda: blocks_used(producer) == [0, 0])
    until(lambda: flower.state(job_id) == "REVOKED")


def test_a_job_delivered_twice_ends_cancelled_when_terminated_in_flower(
    stack: Stack, flower: Flower, producer: Celery, client: Client
) -> None:
    job_id = client.submit(**LONG)
    until(lambda: flower.state(job_id) == "STARTED")
    producer.send_task(
        GENERATE_TASK, args=[str(job_id)], task_id=str(job_id), queue=generate_queue(MODEL)
    )
    until(lambda: is_taken(stack))

    flower.revoke(job_id, terminate=True)

    until(lambda: state(client, job_id) is JobState.CANCELLED)
    until(lambda: blocks_used(producer) == [0, 0])


def test_the_command_writes_a_trace_of_both_stages(
    stack: Stack, client: Client, tmp_path: Path
) -> None:
    job = client.wait(
        client.submit(MODEL, "sort: 3, 1, 2 =", max_tokens=16, temperature=0), timeout_s=60
    )
    file = tmp_path / "trace.json"

    ran = traced(stack, "--output", str(file))

    assert ran.exit_code == 0, ran.output
    assert "of 2 stages" in ran.stdout
    computed = [
        event for event in json.loads(file.read_text())["traceEvents"] if event["name"] == "compute"
    ]
    head, tail = ([event for event in computed if event["pid"] == place] for place in (0, 1))
    assert job.result is not None
    assert sum(event["args"]["sampled"] for event in head) >= job.result.usage.completion_tokens
    starts = {event["args"]["step"]: event["ts"] for event in head}
    assert tail
    assert all(event["ts"] >= starts[event["args"]["step"]] for event in tail), (
        "one clock for a host"
    )


def test_a_trace_of_an_unknown_model_says_so(stack: Stack, tmp_path: Path) -> None:
    ran = traced(stack, "--model", "nobody", "--output", str(tmp_path / "x.json"))
    assert (ran.exit_code, ran.stderr) == (
        3,
        "no pipeline of nobody is ready: see `shardline pipelines`\n",
    )


def traced(stack: Stack, *options: str) -> Result:
    """`shardline trace` against the stack."""
    urls = stack.look()["urls"]
    servers = {"SHARDLINE_DATABASE_URL": urls["database"], "SHARDLINE_REDIS_URL": urls["redis"]}
    return CliRunner().invoke(cli, ["trace", *options], env=servers)


def test_a_queued_job_revoked_in_flower_ends_cancelled(flower: Flower, client: Client) -> None:
    job_id = client.submit(**LONG, delay_s=3600)

    flower.revoke(job_id, terminate=False)

    until(lambda: state(client, job_id) is JobState.CANCELLED)


def test_flower_shows_success_and_run_time_of_a_finished_job(
    flower: Flower, client: Client
) -> None:
    job_id = client.submit(MODEL, "sort: 3, 1, 2 =", max_tokens=16, temperature=0)
    assert client.wait(job_id, timeout_s=60).state is JobState.SUCCEEDED

    until(lambda: flower.state(job_id) == "SUCCESS")

    task = flower.get(f"task/info/{job_id}")
    assert task["name"] == GENERATE_TASK
    assert task["runtime"] > 0
    assert task["worker"].partition(".")[2].startswith("0@"), "a head ran it"
