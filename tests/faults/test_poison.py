"""Poison jobs on a real stack: whatever one does to its process, it ends `failed` alone and its
neighbors succeed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pytest

from shardline.client import Client
from shardline.contract.job import Job, JobState
from shardline_server.failpoints import Point
from tests.chaos.faults.arming import Arming, arm
from tests.faults.small_stack import END_S, Hurt, request, tokens_of
from tests.polling import until

pytestmark = pytest.mark.short_leases

SEED = 987_654_321
"""A stage knows a job by the seed that its producer chose."""

MAX_CRASHES = 2
NUM_NEIGHBORS = 12

UNDER_WAY = """
SELECT count(*) FROM jobs JOIN attempts ON attempts.job_id = jobs.id AND attempts.fence = jobs.fence
WHERE jobs.id = ANY(:ids) AND cardinality(attempts.tokens) > 0
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Poison:
    """What happens to the process that takes in the job's prompt, each time."""

    what: str
    action: str
    place: int

    def arm(self, hurt: Hurt) -> Arming:
        """From now on."""
        when = {"place": self.place, "seed": SEED}
        return arm(
            hurt.failpoints, Point.MID_PREFILL, self.action, when=when, pause_s=600, times=None
        )


POISONS = (
    Poison(what="kills the head", action="kill", place=0),
    Poison(what="kills the tail", action="kill", place=1),
    Poison(what="raises in the tail", action="raise", place=1),
    Poison(what="hangs the head", action="pause", place=0),
)


@pytest.fixture
def said(undisturbed: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """What the neighbors say when nobody dies, over and over."""
    return [undisturbed[number % len(undisturbed)] for number in range(NUM_NEIGHBORS)]


@pytest.fixture
def client(hurt: Hurt) -> Iterator[Client]:
    with hurt.client() as client:
        yield client


def neighbors() -> list[dict[str, Any]]:
    return [request(number) for number in range(NUM_NEIGHBORS)]


def submit_poison(client: Client) -> UUID:
    """First in its line, among good jobs."""
    return client.submit_many(
        [{**request(1), "seed": SEED, "priority": 0, "max_crashes": MAX_CRASHES}]
    )[0]


@pytest.mark.parametrize("poison", POISONS, ids=lambda poison: poison.what)
def test_only_the_job_that_keeps_breaking_its_process_ends_as_a_dead_letter(
    poison: Poison, hurt: Hurt, client: Client, said: list[tuple[int, ...]]
) -> None:
    ids = client.submit_many(neighbors())
    until(lambda: hurt.count(UNDER_WAY, ids) == NUM_NEIGHBORS)
    arming = poison.arm(hurt)
    poison_id = submit_poison(client)
    late = client.submit_many(neighbors())

    jobs = client.wait([*ids, *late], timeout_s=END_S, must_succeed=False)
    dead = client.wait(poison_id, timeout_s=END_S, must_succeed=False)
    arming.disarm()

    assert [tokens_of(job) for job in jobs] == [*said, *said]
    assert [job.crashes for job in jobs[:NUM_NEIGHBORS]] == [0] * NUM_NEIGHBORS
    check_dead_letter(client, dead)
    assert arming.num_strikes >= MAX_CRASHES


def check_dead_letter(client: Client, dead: Job) -> None:
    """It failed with its history, and is listed."""
    assert dead.state is JobState.FAILED, dead
    error = dead.error or {}
    assert (error.get("code"), error.get("crashes")) == ("crashed", MAX_CRASHES), error
    outcomes = [attempt.outcome for attempt in client.get_dead(dead.id).attempts]
    # A slow machine may not form the pipeline anew in time: then leases are given back meanwhile.
    assert [outcome for outcome in outcomes if outcome != "released"] == [
        "failed",
        *["crashed"] * (MAX_CRASHES - 1),
    ]
    assert dead.id in [job.id for job in client.list_dead()]


def test_logits_that_are_not_numbers_fail_their_job_at_once_and_alone(
    hurt: Hurt, client: Client, said: list[tuple[int, ...]]
) -> None:
    arming = arm(hurt.failpoints, Point.NAN_LOGITS, "nan", when={"seed": SEED})
    ids = client.submit_many(neighbors())
    poison_id = submit_poison(client)

    dead = client.wait(poison_id, timeout_s=END_S, must_succeed=False)

    arming.wait()
    assert (dead.state, dead.crashes) == (JobState.FAILED, 0)
    assert "not finite" in (dead.error or {})["problem"]
    jobs = client.wait(ids, timeout_s=END_S)
    assert [tokens_of(job) for job in jobs] == said
    assert {job.crashes for job in jobs} == {0}


def test_a_replayed_dead_letter_succeeds_on_a_mended_worker(hurt: Hurt, client: Client) -> None:
    (newest, *_) = client.list_dead(limit=1)
    replayed = client.wait(client.replay(newest.id), timeout_s=END_S)
    assert (replayed.replay_of, replayed.seed) == (newest.id, SEED)
    assert len(tokens_of(replayed)) == request(1)["max_tokens"]
