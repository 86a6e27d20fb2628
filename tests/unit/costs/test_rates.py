"""What a profile means in bytes and operations per second."""

from __future__ import annotations

import pytest

from shardline_costs import LayerTimes
from shardline_costs.rates import Rates
from tests.unit.fleet.planner.fleets import LAYER_S, device, model

WEIGHTS = 64 * 128 + 64 * 64 + 64 * 512 + 256 * 64
"""Of a layer: queries, keys and values; output; gate and up; down."""
TIMED = ((1, 1), (64, 64), (256, 64))
"""Rows, and those of them that a millisecond of the device does."""


def test_rates_count_the_weights_that_a_row_meets() -> None:
    rates = Rates.of(device("a:0"), model())
    assert rates.weight_bytes_per_s == pytest.approx(4 * WEIGHTS / LAYER_S)
    assert dict(rates.flops) == pytest.approx(
        {rows: 2 * num * WEIGHTS / LAYER_S for rows, num in TIMED}
    )
    assert rates.kv_bytes_per_s is None


def test_of_experts_only_the_active_ones_count() -> None:
    experts = model(num_local_experts=8, num_experts_per_tok=2)
    kind = experts.layers[0].name
    rates = Rates.of(device("a:0", kinds=(kind,)), experts)
    active = 64 * 128 + 64 * 64 + 64 * 8 + 2 * (64 * 512 + 256 * 64)
    assert rates.weight_bytes_per_s == pytest.approx(4 * active / LAYER_S)


def test_kinds_of_layers_count_by_their_number() -> None:
    kinds = ("full_attention", "sliding_attention", "sliding_attention")
    context_s = {"full_attention": 4e-6, "sliding_attention": 1e-6}
    profile = device("a:0", kinds=kinds)
    layers = {
        kind: LayerTimes(
            rows=profile.layers[kind].rows, decode_context_s=seconds, prefill_context_s=0.0
        )
        for kind, seconds in context_s.items()
    }
    rates = Rates.of(device("a:0", layers=layers), model(3, kinds=kinds))
    assert rates.kv_bytes_per_s == pytest.approx(3 * 2 * 2 * 16 * 4 / (4e-6 + 2 * 1e-6))
