"""A process dies at each failpoint, under load through four doors: every job ends once, with the
same tokens."""

from __future__ import annotations

import random
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

import pytest

from tests.chaos.faults.failpoint_faults import FAULTS, KillAt
from tests.faults.small_stack import Hurt, Producer, tokens_of
from tests.polling import until

pytestmark = pytest.mark.short_leases

MAX_TOKENS = 150
NUM_AT_ONCE = 8
"""Jobs that have not ended, at most: a trickle that goes on until the point has struck."""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.kind)
def test_a_process_killed_at_a_failpoint_leaves_each_job_ended_once_and_unchanged(
    fault: KillAt, hurt: Hurt, undisturbed: list[tuple[int, ...]]
) -> None:
    with closing(Producer(hurt.urls, MAX_TOKENS)) as producer:
        with ThreadPoolExecutor(1) as thread:
            striking = thread.submit(fault.strike, hurt, random.Random(0))
            keep_asking(producer, striking)
            striking.result()
        jobs = producer.ended()
        expected = {
            job_id: undisturbed[number][:MAX_TOKENS] for job_id, number in producer.asked.items()
        }
    assert {job_id: tokens_of(job) for job_id, job in jobs.items()} == expected
    assert hurt.count("SELECT count(*) FROM results WHERE job_id = ANY(:ids)", list(jobs)) == len(
        jobs
    )


def keep_asking(producer: Producer, striking: Future[None]) -> None:
    """Work of all kinds until the fault has struck."""

    def is_enough() -> bool:
        if producer.num_open() < NUM_AT_ONCE:
            producer.ask()
        return striking.done()

    until(is_enough)
