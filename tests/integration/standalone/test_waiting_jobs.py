"""A chain of jobs, each by another door, on a whole stack whose relay is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from uuid import UUID

import psycopg
import pytest

from services.standalone.demo.producers import DOORS, Producer
from shardline.client import Client
from shardline.contract.ids import new_id
from shardline.contract.job import JobRequest
from shardline.contract.parents.parent_job import ParentJob
from tests.polling import until
from tests.stack import ForkedStack, Stack

PATIENCE_S = 120
SQL = """
INSERT INTO jobs (id, model, prompt, params, depends_on)
VALUES (%s, 'clerk', 'sum:{{x}} + 1 =', '{"temperature": 0, "max_tokens": 16}',
    jsonb_build_array(jsonb_build_object('job', %s::text, 'as', 'x')))
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = ForkedStack(tmp_path_factory.mktemp("waiting"), SHARDLINE_STAGES="1")
    stack.start()
    yield stack
    stack.end()


def kill_relay(stack: Stack) -> None:
    os.kill(stack.look()["processes"]["relay"], signal.SIGKILL)


def link(number: int, parent: UUID | None) -> JobRequest:
    waited = () if parent is None else (ParentJob(job=parent, name="x"),)
    prompt = "sum: 1 + 2 =" if parent is None else f"sum:{{{{x}}}} + {number} ="
    return JobRequest(
        id=new_id(),
        model="clerk",
        prompt=prompt,
        temperature=0.0,
        max_tokens=16,
        # The first one begins when the test lets it.
        delay_s=0.0 if waited else 3600.0,
        depends_on=waited or None,
    )


def test_a_chain_over_every_door_ends_as_without_kills(stack: Stack, client: Client) -> None:
    urls = stack.urls
    producer = Producer(urls=urls, api_key=urls["api_key"], model="clerk")
    chain: list[UUID] = []
    for number, door in enumerate(["client", "celery", "redis", "http"]):
        request = link(number, chain[-1] if chain else None)
        assert request.id is not None
        DOORS[door](producer, [request])
        chain.append(request.id)
        until(lambda: client.get_many(chain[-1:]))
    chain.append(new_id())
    with psycopg.connect(urls["database"]) as connection:
        connection.execute(SQL, (chain[-1], str(chain[-2])))
    assert [client.get(job).waits_for for job in chain] == [(), *((job,) for job in chain[:-1])]

    kill_relay(stack)
    with psycopg.connect(urls["database"]) as connection:
        connection.execute("UPDATE jobs SET not_before = now() WHERE id = %s", (chain[0],))
    client.wait(chain[0], timeout_s=PATIENCE_S)
    until(lambda: stack.look()["processes"].get("relay") is not None)
    kill_relay(stack)
    jobs = client.wait(chain, timeout_s=PATIENCE_S)

    texts = [job.result.text for job in jobs if job.result is not None]
    prompts = [job.prompt or "" for job in jobs]
    plain = [
        prompt.replace("{{x}}", text) for prompt, text in zip(prompts[1:], texts, strict=False)
    ]
    requests = [
        {"model": "clerk", "prompt": one, "temperature": 0.0, "max_tokens": 16} for one in plain
    ]
    expected = client.wait(client.submit_many(requests), timeout_s=PATIENCE_S)
    assert [job.prompt_token_ids for job in jobs[1:]] == [job.prompt_token_ids for job in expected]
    for job, other in zip(jobs[1:], expected, strict=True):
        assert job.result is not None
        assert other.result is not None
        assert job.result.token_ids == other.result.token_ids
