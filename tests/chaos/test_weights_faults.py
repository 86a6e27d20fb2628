"""Damaged weights are damaged as their names say, and mended afterwards."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.stage.device.device import Device
from services.stage.model.weights import check_file
from shardline.base.errors import Invalid
from tests.chain import load_chain
from tests.chaos.faults.weights_faults import (
    FAULTS,
    Damage,
    Harm,
    cut_short,
    damaged,
    with_flipped_bit,
    with_oversized_header,
    with_wrong_shapes,
)
from tests.encoders import save_encoder
from tests.models import save_model
from tests.pinned import first_core


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    with first_core(tmp_path) as device:
        yield device


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


@pytest.mark.parametrize(("save", "name"), [(save_model, "llama"), (save_encoder, "bert")])
def test_a_stage_refuses_wrong_shapes_of_every_kind_of_model_by_name(
    save: Callable[[Path, str], Path], name: str, tmp_path: Path, device: Device
) -> None:
    path = save(tmp_path, name)
    (damage,) = (fault for fault in FAULTS if fault.kind == "weights: wrong shapes")
    with (
        damaged(path / "model.safetensors", with_wrong_shapes, random.Random(1)),
        pytest.raises(Invalid) as caught,
    ):
        load_chain(path, 2, device, tmp_path)
    assert isinstance(damage, Damage)
    assert re.search(damage.said, str(caught.value))


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
