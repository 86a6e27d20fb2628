"""Whole simulations: speeds near what is predicted, fleets that scale, what losses, joins and slow
links cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardline.base.errors import Invalid
from shardline_fleet.simulator.fleet_file import FleetFile
from shardline_fleet.simulator.outcome import Outcome
from shardline_fleet.simulator.simulation import Simulation

SMALL = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "vocab_size": 1000,
}
LARGE = {
    "num_hidden_layers": 16,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 1000,
}
"""Of which an l4 holds a half, but not all."""
SLOW_LAYERS = {"layer_us": 10_000}
LATE_S = 20.0
STRIKES_THE_TAIL = 0
"""A seed."""


def simulated(
    model: dict[str, int], devices: dict[str, int], *, count: int = 1, **other: Any
) -> Outcome:
    per_machine = other.pop("per_machine", 1)
    text = {
        "model": model,
        "cells": [{"devices": devices, "count": count, "per_machine": per_machine}],
        "assumed": SLOW_LAYERS,
        **other,
    }
    return Simulation(msgspec.convert(text, FleetFile), Path()).run()


def server(rate: float, seconds: float = 40.0, **other: Any) -> dict[str, Any]:
    return {
        "scenario": "server",
        "rate": rate,
        "seconds": seconds,
        "prompt": 32,
        "output": 32,
        **other,
    }


@pytest.mark.parametrize(("model", "num"), [(SMALL, 1), (LARGE, 2)])
def test_a_batch_is_as_fast_as_the_planner_predicts(model: dict[str, int], num: int) -> None:
    outcome = simulated(model, {"l4": num}, load={"jobs": 1024, "prompt": 128, "output": 64})
    assert outcome.fleet.stages == num
    assert outcome.unfinished == outcome.failed == 0
    assert outcome.tokens_per_s == pytest.approx(outcome.fleet.predicted_tokens_per_s, rel=0.1)


def test_equal_cells_add_up_and_a_sample_stands_for_all() -> None:
    load = {"jobs": 100, "prompt": 32, "output": 32}
    one = simulated(SMALL, {"l4": 1}, load=load)
    many = simulated(SMALL, {"l4": 1}, count=1000, sample=3, load={**load, "jobs": 100_000})
    assert many.fleet.simulated_cells == 3
    assert many.fleet.pipelines == 1000
    assert many.tokens_per_s == pytest.approx(1000 * one.tokens_per_s, rel=0.05)
    assert many.ttft_s.p50 == pytest.approx(one.ttft_s.p50, rel=0.05)


def test_the_same_seed_gives_the_same_outcome() -> None:
    load = server(3.0, spread=0.5)
    first, again = (simulated(SMALL, {"l4": 2}, load=load, seed=5) for _ in range(2))
    assert first == again
    assert simulated(SMALL, {"l4": 2}, load=load, seed=6) != first


def test_a_server_keeps_its_bounds_until_it_is_asked_for_too_much() -> None:
    able = simulated(SMALL, {"l4": 1}, load=server(5.0))
    assert able.keeps_bounds
    assert able.jobs_per_s == pytest.approx(5.0, rel=0.2)
    over = simulated(SMALL, {"l4": 1}, load=server(60.0, seconds=20.0))
    assert not over.keeps_bounds
    assert over.ttft_s.p99 > over.ttft_s.p50 > able.ttft_s.p99


def test_without_a_spare_jobs_wait_for_the_stage_to_come_back() -> None:
    fault = {"at_s": LATE_S, "lose": 0.5, "back_s": 15.0}
    alone = simulated(LARGE, {"l4": 2}, load=server(1.0), faults=[fault], seed=STRIKES_THE_TAIL)
    assert alone.unfinished == 0
    assert 15.0 < alone.held_up_s.p50 < 19.0
    assert alone.tokens_again == 0


def test_jobs_of_a_dead_head_go_on_elsewhere_from_their_saved_tokens() -> None:
    outcome = simulated(
        SMALL, {"l4": 2}, load=server(4.0), faults=[{"at_s": LATE_S, "lose": 0.5, "machines": True}]
    )
    assert outcome.unfinished == 0
    assert 9.0 < outcome.held_up_s.p50 < 13.0
    assert 0 < outcome.tokens_again < 64 * 32


def test_a_restarted_process_gives_its_jobs_back_before_its_lease_ends() -> None:
    fault = {"at_s": LATE_S, "lose": 0.5, "back_s": 2.0}
    assert simulated(SMALL, {"l4": 2}, load=server(4.0), faults=[fault]).held_up_s.p50 < 5.0


def test_a_cell_that_lost_a_stage_for_good_is_cut_anew() -> None:
    fault = {"at_s": LATE_S, "lose": 0.3, "machines": True}
    outcome = simulated(
        LARGE, {"l4": 3}, load=server(0.5, seconds=120.0), load_s=10.0, faults=[fault]
    )
    assert outcome.unfinished == 0
    assert sum(outcome.timeline[100:120]) > 0


def test_workers_that_join_make_the_fleet_faster() -> None:
    load = {"jobs": 3000, "prompt": 32, "output": 32}
    alone = simulated(SMALL, {"l4": 1}, load=load)
    joined = simulated(
        SMALL, {"l4": 4}, load=load, load_s=1.0, faults=[{"at_s": 10.0, "join": 0.75}]
    )
    assert joined.fleet.pipelines == 1
    assert joined.seconds < 0.6 * alone.seconds


def test_slow_links_slow_pipelines_of_several_stages_only() -> None:
    slow = [{"at_s": 0.0, "slow": 1.0, "latency_ms": 300}]
    load = {"jobs": 32, "prompt": 32, "output": 32}
    one, two = ((model, {"l4": num}) for model, num in ((SMALL, 1), (LARGE, 2)))
    assert simulated(*one, load=load, faults=slow) == simulated(*one, load=load)
    assert (
        simulated(*two, load=load, faults=slow).seconds > 1.5 * simulated(*two, load=load).seconds
    )


def test_a_model_that_a_cell_does_not_hold_is_refused() -> None:
    with pytest.raises(Invalid, match=r"cells\[0\].devices"):
        simulated(LARGE, {"l4": 1}, load=server(1.0))
