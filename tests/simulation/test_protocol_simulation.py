"""The whole protocol under a virtual clock: hundreds of seeded storms, and after each one every
promise is kept.

Heads, later stages, relays, their threads, control links and hops are the product's own code; see
`seams` for what is simulated. A seed that breaks says how to replay it.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from tests.simulation.play import Outcome, play

NUM_SEEDS = 480
SEEDS_PER_TEST = 60


def storms(first: int) -> pytest.MarkDecorator:
    """What shares these outcomes stays in one process of pytest-xdist; others play other storms."""
    return pytest.mark.xdist_group(f"storms from {first}")


@cache
def outcomes(first: int) -> list[Outcome]:
    """Of the storms that one test plays."""
    return list(play(range(first, first + SEEDS_PER_TEST)))


@pytest.mark.parametrize(
    "first",
    [pytest.param(first, marks=storms(first)) for first in range(0, NUM_SEEDS, SEEDS_PER_TEST)],
)
def test_every_job_ends_once_with_its_tokens_in_any_storm(first: int) -> None:
    broken = [outcome for outcome in outcomes(first) if outcome.problem is not None]

    assert not broken, "\n".join(outcome.report() for outcome in broken)


@storms(0)
def test_one_seed_plays_the_same_run() -> None:
    assert list(play(range(40, 60))) == outcomes(0)[40:60]


@storms(0)
def test_storms_bring_about_all_that_they_are_for() -> None:
    tally = Counter[str]()
    for outcome in outcomes(0):
        tally.update(outcome.tally)

    assert not [name for name, number in tally.items() if number == 0], tally
