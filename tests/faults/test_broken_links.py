"""A link that breaks under a job, again and again, while every process lives: no crash is
counted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardline_server.failpoints import Point
from tests.chaos.faults.arming import arm
from tests.chaos.network.hop_net import HopNet
from tests.faults.small_stack import END_S, Hurt, request, small_stack, tokens_of

pytestmark = pytest.mark.short_leases

NUM_BREAKS = 4
SEED = 4
MAX_TOKENS = 20
PROMPT_S = 3.0
"""How long the tail computes the prompt: the link breaks meanwhile."""

OUTCOMES = "SELECT count(*) FROM attempts WHERE job_id = ANY(:ids) AND outcome = 'released'"


@pytest.fixture
def net() -> Iterator[HopNet]:
    net = HopNet()
    net.start()
    yield net
    net.stop()


@pytest.fixture
def hurt(net: HopNet) -> Iterator[Hurt]:
    with small_stack(**net.settings) as hurt:
        yield hurt


def test_a_job_outlives_more_broken_links_than_it_may_crash(hurt: Hurt, net: HopNet) -> None:
    wanted = {**request(SEED, MAX_TOKENS), "max_crashes": 1}
    with hurt.client() as client:
        (undisturbed,) = client.wait(client.submit_many([wanted]), timeout_s=END_S)
        pids = [hurt.pid("stage-0"), hurt.pid("stage-1")]
        when = {"place": 1, "seed": SEED}
        arming = arm(
            hurt.failpoints,
            Point.MID_PREFILL,
            "pause",
            when=when,
            pause_s=PROMPT_S,
            times=NUM_BREAKS,
        )
        ids = client.submit_many([wanted])
        for number in range(NUM_BREAKS):
            arming.wait(number + 1)
            for link in net.to(pids[1]):
                link.cut()
        (job,) = client.wait(ids, timeout_s=END_S)

    assert tokens_of(job) == tokens_of(undisturbed)
    assert job.crashes == 0
    assert hurt.count(OUTCOMES, ids) == NUM_BREAKS - 1, "the first break only makes it run alone"
    assert [hurt.pid("stage-0"), hurt.pid("stage-1")] == pids, "nobody died"
