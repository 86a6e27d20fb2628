"""Damaged weights are damaged as their names say, and mended afterwards."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from services.stage.model.weights import check_file
from shardline.errors import Invalid
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
def test_given_a_broken_file_when_checked_then_its_header_gives_it_away(harm: Harm, weights: Path) -> None:
    with damaged(weights, harm, random.Random(1)), pytest.raises(Invalid, match="Copy the model again"):
        check_file(weights)


@pytest.mark.parametrize("harm", [with_wrong_shapes, with_flipped_bit])
def test_given_other_shapes_or_bits_when_checked_then_the_file_is_right_in_itself(harm: Harm, weights: Path) -> None:
    whole = weights.read_bytes()
    with damaged(weights, harm, random.Random(1)):
        assert weights.read_bytes() != whole
        assert check_file(weights).size_bytes == len(whole)


def test_given_damaged_weights_when_mended_then_bytes_and_times_are_those_of_before(weights: Path) -> None:
    whole, time_ns = weights.read_bytes(), weights.stat().st_mtime_ns
    with damaged(weights, cut_short, random.Random(1)):
        pass
    assert weights.read_bytes() == whole
    assert weights.stat().st_mtime_ns == time_ns
