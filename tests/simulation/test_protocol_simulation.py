"""The whole protocol under a virtual clock: a thousand seeded storms, and after each one every promise is kept.

Heads, later stages, relays, their threads, control links and hops are the product's own code; see `seams` for what is
simulated. A seed that breaks says how to replay it.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.play import play

SEEDS_PER_TEST = 125


@pytest.mark.parametrize("first", range(0, 1_000, SEEDS_PER_TEST))
def test_given_any_storm_when_it_is_over_then_every_job_ended_once_with_its_tokens(first: int) -> None:
    broken = [outcome for outcome in play(range(first, first + SEEDS_PER_TEST)) if outcome.problem is not None]

    assert not broken, "\n".join(outcome.report() for outcome in broken)


def test_given_a_seed_when_played_again_then_it_is_the_same_run() -> None:
    once, again = (list(play(range(40, 60))) for _ in range(2))

    assert once == again


def test_given_some_storms_when_counted_then_all_that_they_are_for_came_about() -> None:
    tally = Counter[str]()
    for outcome in play(range(120)):
        tally.update(outcome.tally)

    assert not [name for name, number in tally.items() if number == 0], tally
