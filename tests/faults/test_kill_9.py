"""kill -9 of each process under load, one after the other: every accepted job ends once, with the
same tokens."""

from __future__ import annotations

import os
import signal

import httpx
import psutil
import pytest

from tests.faults.small_stack import END_S, Hurt, request, tokens_of
from tests.polling import until

pytestmark = pytest.mark.short_leases

NUM_JOBS = 16
VICTIMS = ("stage-1", "stage-0", "relay", "gateway", "redis")

STARTED = """
SELECT count(*)
FROM attempts JOIN jobs ON jobs.id = attempts.job_id AND jobs.fence = attempts.fence
WHERE jobs.id = ANY(:ids) AND jobs.state = 'running'
    AND cardinality(attempts.tokens) BETWEEN 1 AND 250
"""


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_killed_process_leaves_each_job_ended_once_and_unchanged(
    victim: str, hurt: Hurt, undisturbed: list[tuple[int, ...]]
) -> None:
    until(lambda: is_served(hurt))
    with hurt.client() as client:
        ids = client.submit_many([request(number) for number in range(NUM_JOBS)])
        until(lambda: hurt.count(STARTED, ids) > NUM_JOBS // 2)
        before = hurt.stack.look()["processes"]
        os.kill(before[victim], signal.SIGKILL)

        jobs = client.wait(ids, timeout_s=END_S)

    assert [tokens_of(job) for job in jobs] == [
        undisturbed[number % len(undisturbed)] for number in range(NUM_JOBS)
    ]
    assert hurt.count("SELECT count(*) FROM results WHERE job_id = ANY(:ids)", ids) == NUM_JOBS
    until(lambda: is_whole_again(hurt, victim, before[victim]))
    assert {**hurt.stack.look()["processes"], victim: before[victim]} == before, (
        "another process died with it"
    )


def is_whole_again(hurt: Hurt, victim: str, dead_pid: int) -> bool:
    """The victim runs again under a new pid and a generation passes through every stage."""
    pid = hurt.stack.look()["processes"].get(victim)
    return pid not in (None, dead_pid) and psutil.pid_exists(pid) and is_served(hurt)


def is_served(hurt: Hurt) -> bool:
    """A completion goes through the gateway."""
    try:
        return hurt.stack.complete().status_code == 200
    except httpx.TransportError:
        return False
