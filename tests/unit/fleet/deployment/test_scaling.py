"""How many workers a load needs."""

from __future__ import annotations

import pytest

from shardline_costs import DeviceProfile, Workload
from shardline_fleet.deployment.scaling import Scaling
from tests.unit.fleet.planner.fleets import device, model

LOAD = Workload(prompt=64, output=64)
SMALL = 2 << 20
"""Bytes that hold about half of the model."""


def scaling(*here: DeviceProfile) -> Scaling:
    return Scaling(model(), here, LOAD)


def speed(found: Scaling, workers: int) -> float:
    size = found.size(workers, 0.0)
    assert size is not None
    return size.tokens_per_s


def test_twice_the_workers_do_twice_the_work_with_twice_the_seats() -> None:
    found = scaling(device("a:0"))
    assert speed(found, 8) == pytest.approx(8 * speed(found, 1), rel=0.1)


@pytest.mark.parametrize("times", [0.1, 0.69, 0.71, 3.4, 20])
def test_the_fewest_workers_are_found_of_which_the_load_takes_its_share(times: float) -> None:
    found = scaling(device("a:0"))
    tokens_per_s = times * speed(found, 1)

    needed = found.needed(tokens_per_s, 0.7)

    assert needed is not None
    assert needed.used <= 0.7
    fewer = found.size(needed.workers - 1, tokens_per_s) if needed.workers > 1 else None
    assert fewer is None or fewer.used > 0.7


def test_workers_that_do_not_hold_the_model_alone_are_added_until_they_do() -> None:
    found = scaling(device("a:0", memory_bytes=SMALL))
    needed = found.needed(0.0, 0.7)
    assert found.size(1, 0.0) is None
    assert needed is not None
    assert needed.workers == 2


def test_the_fastest_that_are_here_stay_and_further_ones_are_of_the_usual_kind() -> None:
    found = scaling(device("slow:0", slower=4), device("slow:1", slower=4), device("fast:0"))
    alone = scaling(device("fast:0"))
    usual = scaling(device("slow:0", slower=4))
    assert speed(found, 1) == speed(alone, 1)
    assert speed(found, 5) < speed(alone, 1) + 5 * speed(usual, 1)


def test_a_load_beyond_all_workers_has_no_number() -> None:
    found = scaling(device("a:0"))
    assert found.needed(1000 * speed(found, 1), 0.7, at_most=4) is None
