"""Damaged weights are damaged as their names say, and mended afterwards."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from services.stage.model.weights import check_file
from shardline.base.errors import Invalid
from tests.chaos.faults.weights_faults import (
    Harm,
    cut_short,
    damaged,
    with_flipped_bit,
    with_oversized_header,
    with_wrong_shapes,
)
from tests.models import save_model


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Of a small Llama of its own."""
    return save_model(tmp_path / "model", "llama") / "model.safetensors"


@pytest.mark.parametrize("harm", [cut_short, with_oversized_header])
def test_the_header_of_a_broken_file_gives_it_away(harm: Harm, weights: Path) -> None:
    with (
        damaged(weights, harm, random.Random(1)),
        pytest.raises(Invalid, match="Copy the model again"),
    ):
        check_file(weights)


@pytest.mark.parametrize("harm", [with_wrong_shapes, with_flipped_bit])
def test_a_file_with_other_shapes_or_bits_is_valid_in_itself(harm: Harm, weights: Path) -> None:
    whole = weights.read_bytes()
    with damaged(weights, harm, random.Random(1)):
        assert weights.read_bytes() != whole
        assert check_file(weights).size_bytes == len(whole)


def test_mended_weights_have_the_bytes_and_times_of_before(weights: Path) -> None:
    whole = weights.read_bytes()
    time_ns = weights.stat().st_mtime_ns
    with damaged(weights, cut_short, random.Random(1)):
        pass
    assert weights.read_bytes() == whole
    assert weights.stat().st_mtime_ns == time_ns
