"""Experts in MXFP4: every code and scale means what transformers says, and broken files are refused
with the name of what is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

from services.stage.model.float_files import with_floats
from services.stage.model.model_info import ModelInfo
from services.stage.model.quantization import Mxfp4
from services.stage.model.shard import Shard
from shardline.base.errors import Invalid
from tests.mxfp4_models import Experts, save_mxfp4

LAYER = "model.layers.1.mlp.experts.down_proj"


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    return Mxfp4().weight({"blocks": blocks, "scales": scales})


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def all_bytes(scale: int) -> Experts:
    """Every pair of codes with one scale: one expert with one output of 16 groups."""
    scales = torch.full((1, 1, 16), scale, dtype=torch.uint8)
    return Experts(torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16), scales)


def test_a_byte_holds_two_numbers_the_first_in_its_low_bits() -> None:
    weights = unpacked(*all_bytes(127))
    expected = [FP4_VALUES[byte >> shift & 15] for byte in range(256) for shift in (0, 4)]
    assert weights.dtype == torch.bfloat16
    assert weights.shape == (1, 512, 1)
    assert same_bits(weights.flatten(), torch.tensor(expected, dtype=torch.bfloat16))


@pytest.mark.parametrize("scale", [0, 1, 2, 126, 127, 128, 252])
def test_every_code_at_small_and_large_scales_is_exact(scale: int) -> None:
    packed = all_bytes(scale)
    weights = unpacked(*packed)
    assert torch.equal(weights.double(), packed.floats())
    assert same_bits(weights, convert_moe_packed_tensors(*packed))


def test_experts_are_transposed_as_transformers_does() -> None:
    packed = Experts.drawn(3, 96, 40, seed=1)
    weights = unpacked(*packed)
    assert weights.shape == (3, 96, 40)
    assert same_bits(weights, convert_moe_packed_tensors(*packed))


def test_scale_254_is_exact_for_numbers_that_bfloat16_holds() -> None:
    blocks = torch.full((1, 1, 1, 16), 0xB3, dtype=torch.uint8)  # 1.5 and -1.5
    weights = unpacked(blocks, torch.full((1, 1, 1), 254, dtype=torch.uint8))
    assert weights.flatten()[:2].tolist() == [1.5 * 2.0**127, -1.5 * 2.0**127]


@pytest.mark.parametrize("scale", [253, 254, 255])
def test_a_scale_that_leaves_bfloat16_is_refused(scale: int) -> None:
    blocks, scales = Experts.drawn(3, 64, 8, seed=1)
    blocks[2, 5, 1] = 0x66 if scale < 255 else 0  # 4, or zeros: NaN times these is none
    scales[2, 5, 1] = scale
    with pytest.raises(ValueError, match="expert 2 has a scale that is not finite in bfloat16"):
        unpacked(blocks, scales)


def change(folder: Path, name: str, tensor: Tensor | None) -> None:
    """Replaces or removes a tensor in its file."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if tensors.pop(name, None) is not None:
            save_file(tensors if tensor is None else {**tensors, name: tensor}, file)


@pytest.mark.parametrize(
    ("blocks", "scales", "problem"),
    [
        ([5, 64, 3, 16], [5, 64, 2], f"{LAYER}: blocks and scales have the shapes [5, 64, 3, 16]"),
        ([5, 64, 6, 8], [5, 64, 6], f"{LAYER}: blocks and scales have the shapes [5, 64, 6, 8]"),
        ([5, 64, 48], [5, 64, 3], f"{LAYER}: blocks and scales have the shapes [5, 64, 48]"),
        ([5, 64, 3, 16], None, "layer-1 of"),
        ([4, 64, 3, 16], [4, 64, 3], f"has mismatched_keys ('{LAYER}'"),
        ([5, 32, 3, 16], [5, 32, 3], f"has mismatched_keys ('{LAYER}'"),
    ],
)
def test_parts_of_other_shapes_are_refused_with_their_layer(
    blocks: list[int], scales: list[int] | None, problem: str, tmp_path: Path
) -> None:
    _, packed = save_mxfp4(tmp_path)
    change(packed, f"{LAYER}_blocks", torch.zeros(blocks, dtype=torch.uint8))
    new = None if scales is None else torch.zeros(scales, dtype=torch.uint8)
    change(packed, f"{LAYER}_scales", new)
    info = ModelInfo.read(packed)
    with pytest.raises(Invalid, match=re.escape(problem)):
        Shard.load(
            with_floats(info, range(1, 2), torch.bfloat16, tmp_path),
            range(1, 2),
            dtype=torch.bfloat16,
            attn_implementation="eager",
            device=torch.device("cpu"),
        )


def test_parts_of_another_dtype_are_refused() -> None:
    blocks, scales = Experts.drawn(1, 32, 8, seed=1)
    with pytest.raises(ValueError, match=re.escape("are torch.uint8 and torch.int32, not bytes")):
        unpacked(blocks, scales.int())
