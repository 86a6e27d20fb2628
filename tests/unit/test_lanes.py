"""How many steps are in flight for a round trip on links and a stage's time for a step."""

from __future__ import annotations

import pytest

from shardline.contract.fleet.lanes import MAX_LANES, lanes_for


@pytest.mark.parametrize(
    ("num_stages", "round_trip_s", "step_s", "num_lanes"),
    [
        (2, 0.0, 0.05, 2),
        (2, 0.4, 0.0, 2),  # nothing is known of steps
        (2, 0.02, 0.05, 2),
        (2, 0.08, 0.05, 4),
        (3, 0.4, 0.1, 7),
        (2, 0.4, 0.01, MAX_LANES),
        (20, 0.4, 0.01, 20),  # never fewer than stages
    ],
)
def test_lanes_are_stages_and_the_steps_that_a_round_trip_hides(
    num_stages: int, round_trip_s: float, step_s: float, num_lanes: int
) -> None:
    assert lanes_for(num_stages, round_trip_s, step_s) == num_lanes
