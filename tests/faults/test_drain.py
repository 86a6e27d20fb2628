"""SIGTERM of each service under load: nothing is lost, no lease is left to expire, every caller is
answered."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from uuid import UUID, uuid4

import httpx
import psutil
import pytest

from services.standalone.processes import wait_until_gone
from shardline.contract.api_key import bearer
from tests.faults.small_stack import END_S, MAX_TOKENS, Hurt, Producer, request, tokens_of
from tests.polling import until

pytestmark = pytest.mark.short_leases

NUM_JOBS = 16
MORE_THAN_DRAINS = 80
"""More than a head has seats, and those it has take longer than it may drain."""

RUNNING = "SELECT count(*) FROM jobs WHERE id = ANY(:ids) AND state = 'running'"
EXPIRED_LEASES = (
    "SELECT count(*) FROM attempts WHERE job_id = ANY(:ids) AND outcome IN ('lost', 'crashed')"
)


def terminate(hurt: Hurt, name: str) -> None:
    """SIGTERM, as Compose and the supervisor send it; the process must end by itself."""
    process = psutil.Process(hurt.pid(name))
    os.kill(process.pid, signal.SIGTERM)
    assert wait_until_gone(process, timeout_s=END_S), f"{name} does not end"
    assert hurt.pid(name) != process.pid


@pytest.mark.parametrize("name", ["stage-0", "stage-1", "relay", "gateway"])
def test_all_jobs_succeed_and_no_lease_expires_when_a_service_is_stopped(
    name: str, hurt: Hurt, undisturbed: list[tuple[int, ...]]
) -> None:
    with closing(Producer(hurt.urls, MAX_TOKENS)) as producer:
        ids = [producer.ask() for _ in range(NUM_JOBS)]
        until(lambda: hurt.count(RUNNING, ids) > 0)
        terminate(hurt, name)
        jobs = producer.ended()
        expected = {job_id: undisturbed[number] for job_id, number in producer.asked.items()}
    assert {job_id: tokens_of(job) for job_id, job in jobs.items()} == expected
    assert {job.crashes for job in jobs.values()} == {0}
    assert hurt.count(EXPIRED_LEASES, ids) == 0


def test_a_stopping_head_releases_the_leases_it_cannot_finish(
    hurt: Hurt, undisturbed: list[tuple[int, ...]]
) -> None:
    numbers = range(MORE_THAN_DRAINS)
    with hurt.client() as client:
        ids = client.submit_many([request(number) for number in numbers])
        until(lambda: hurt.count(RUNNING, ids) > NUM_JOBS)
        terminate(hurt, "stage-0")
        jobs = client.wait(ids, timeout_s=END_S)
    assert [tokens_of(job) for job in jobs] == [
        undisturbed[number % len(undisturbed)] for number in numbers
    ]
    assert hurt.count(EXPIRED_LEASES, ids) == 0


def test_a_stopping_gateway_gives_each_caller_its_answer_or_its_jobs_id(
    hurt: Hurt, undisturbed: list[tuple[int, ...]]
) -> None:
    url = f"{hurt.urls['gateway']}/v1/completions"
    ids = [uuid4() for _ in undisturbed]

    def complete(number: int) -> httpx.Response:
        body = {**request(number), "id": str(ids[number])}
        return httpx.post(url, json=body, headers=bearer(hurt.urls["api_key"]), timeout=60)

    with ThreadPoolExecutor(len(ids)) as callers:
        answers = [callers.submit(complete, number) for number in range(len(ids))]
        until(lambda: accepted(hurt, ids) == len(ids))
        terminate(hurt, "gateway")
    for job_id, answer in zip(ids, (answer.result() for answer in answers), strict=True):
        if answer.status_code != 200:
            # Not ready within the drain time: how many is a matter of how busy the machine is.
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1"), answer.text
            assert answer.json()["error"]["job_id"] == str(job_id)
    with hurt.client() as client:
        assert [tokens_of(job) for job in client.wait(ids, timeout_s=END_S)] == undisturbed


def accepted(hurt: Hurt, ids: list[UUID]) -> int:
    """Rows that are there."""
    return hurt.count("SELECT count(*) FROM jobs WHERE id = ANY(:ids)", ids)
