"""The learned policies of a benchmark do learn: else a comparison with them would say nothing."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import msgspec
import pytest

from shardline.base.errors import Invalid
from shardline_fleet.simulator.fleet_file import FleetFile, LoadFile
from tests.benchmarks import learned
from tests.benchmarks.learned import BUDGETS, Chain, LearnedHead, QTable, exact, learn_split, play

LOAD = msgspec.convert({"jobs": 8, "prompt": 64, "output": 8}, LoadFile)


def test_a_bandit_finds_the_fastest_split_among_those_that_memory_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noise = random.Random(3)

    def speed(fleet: FleetFile, seed: int) -> float:
        assert fleet.split is not None
        bound = int(fleet.split.partition(",")[0].partition("-")[2]) + 1
        if bound < 10:
            raise Invalid("split", "too large", "Lower it")
        return 100.0 - 5.0 * abs(bound - 22) + noise.gauss(0.0, 2.0)

    monkeypatch.setattr(learned, "speed", speed)
    split, mean = learn_split(learned.fleet_of({"a10": 1, "l4": 1}, 8, {}), 400, random.Random(1))
    assert split == "0-21,22-39"
    assert mean < 95.0


def test_a_table_prefers_what_cost_least() -> None:
    table = QTable(random.Random(1), explored=0.0)
    for _ in range(200):
        for budget in BUDGETS:
            table.learn((1, 1), budget, -1.0 if budget == 128 else -2.0, 0.5, (1, 1))
    assert table.choose((1, 1)) == 128
    assert table.values[(1, 1), 128] == pytest.approx(-2.0, abs=0.05)


@pytest.mark.parametrize("budget", [64, 256])
def test_a_table_that_knows_one_budget_plays_as_a_fixed_one(budget: int) -> None:
    class Fixed(QTable):
        def choose(self, _state: Any) -> int:
            return budget

    heads = exact, partial(LearnedHead, Fixed(random.Random(1)))
    one, other = (play(Chain(2), LOAD, head, budget, seed=5) for head in heads)
    assert one.request_s == other.request_s
    assert one.num_ended == 8
