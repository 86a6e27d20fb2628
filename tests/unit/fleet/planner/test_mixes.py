"""Plans of mixes of devices are as good as those of a search that tries more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardline_fleet.planner import make_plans
from tests.unit.fleet.planner.mixes import drawn_mix

RECORDED = json.loads((Path(__file__).parent / "mixes.json").read_text())
"""Seconds of the plan's goal by seed, as the search of 0.1.0 found them: it tried more orders."""
NEAR = 1.01


@pytest.mark.parametrize("seed", [int(seed) for seed in RECORDED])
def test_no_plan_is_slower_than_the_recorded_one(seed: int) -> None:
    mix = drawn_mix(seed)
    best = make_plans(mix.model, mix.profiles, mix.load, mix.goal).best
    assert best.seconds(mix.goal) <= NEAR * RECORDED[str(seed)]
