"""kill -9 of each process under load, one after the other: every accepted job ends once, with the same tokens."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import psutil
import pytest
from sqlalchemy import text

from shardline.client import Client
from shardline.job import Job, JobState
from shardline.store.database import connect
from tests.stack import Stack, until

NUM_JOBS = 32
MAX_TOKENS = 450
VICTIMS = ("stage-1", "stage-0", "relay", "gateway", "redis")


def requests() -> list[dict[str, Any]]:
    """Half greedy, half sampled under their own seeds; long enough to be caught in the act."""
    return [
        {
            "model": "clerk",
            "prompt": f"sort: {number}, 7, 30, 12 =",
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
            "temperature": 0.8 if number % 2 else 0.0,
            "seed": number,
        }
        for number in range(NUM_JOBS)
    ]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Two stages; all of the protocol's times at a third, so that leases run out soon."""
    folder = Path(tempfile.mkdtemp(prefix="shardline-kill-"))
    stack = Stack(folder, SHARDLINE_TIME_SCALE="0.33")
    stack.start()
    yield stack
    stack.end()
    assert stack.left() == []
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> list[tuple[int, ...]]:
    """The tokens of a run in which nobody dies."""
    with Client(database_url=stack.look()["urls"]["database"]) as client:
        jobs = client.wait(client.submit_many(requests()), timeout_s=240)
    return [tokens_of(job) for job in jobs]


def tokens_of(job: Job) -> tuple[int, ...]:
    """The output ids of a job that must have succeeded."""
    assert job.state is JobState.SUCCEEDED, (job.state, job.error)
    assert job.result is not None
    assert job.result.exact
    return tuple(job.result.token_ids)


def count(database: str, query: str, ids: list[UUID]) -> int:
    """The number that `query` gives for these jobs."""
    engine = connect(database)
    try:
        with engine.connect() as connection:
            return int(connection.execute(text(query), {"ids": ids}).scalar_one())
    finally:
        engine.dispose()


STARTED = """
SELECT count(*) FROM attempts JOIN jobs ON jobs.id = attempts.job_id AND jobs.fence = attempts.fence
WHERE jobs.id = ANY(:ids) AND jobs.state = 'running' AND cardinality(attempts.tokens) BETWEEN 1 AND 350
"""


@pytest.mark.parametrize("victim", VICTIMS)
def test_given_jobs_in_the_act_when_a_process_is_killed_then_each_ends_once_with_the_same_tokens(
    victim: str, stack: Stack, undisturbed: list[tuple[int, ...]]
) -> None:
    urls = stack.look()["urls"]
    with Client(database_url=urls["database"]) as client:
        ids = client.submit_many(requests())
        until(lambda: count(urls["database"], STARTED, ids) > NUM_JOBS // 2)
        before = stack.look()["processes"]
        os.kill(before[victim], signal.SIGKILL)

        jobs = client.wait(ids, timeout_s=240)

    assert [tokens_of(job) for job in jobs] == undisturbed
    assert count(urls["database"], "SELECT count(*) FROM results WHERE job_id = ANY(:ids)", ids) == NUM_JOBS
    until(lambda: is_whole_again(stack, victim, before[victim]))
    assert {**stack.look()["processes"], victim: before[victim]} == before, "another process died with it"


def is_whole_again(stack: Stack, victim: str, dead_pid: int) -> bool:
    """The victim runs again under a new pid and a generation passes through every stage."""
    pid = stack.look()["processes"].get(victim)
    return pid not in (None, dead_pid) and psutil.pid_exists(pid) and is_served(stack)


def is_served(stack: Stack) -> bool:
    """A completion goes through the gateway."""
    try:
        return stack.complete().status_code == 200
    except httpx.TransportError:
        return False
