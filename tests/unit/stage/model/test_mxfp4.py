"""Experts in MXFP4: every code and scale means what transformers says, and broken files are refused
with the name of what is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

from services.stage.device.device import Device
from services.stage.engine.executor import Executor
from services.stage.model.float_files import with_floats
from services.stage.model.model_info import ModelInfo
from services.stage.model.mxfp4_experts import StoredExperts, in_groups, mxfp4_experts
from services.stage.model.quantization import Mxfp4
from services.stage.model.shard import Shard, build_skeleton
from services.stage.model.weights import fingerprint
from services.stage.products.groups import INT8_BYTES
from shardline.base.errors import Invalid
from shardline.contract.job import SamplingParams
from shardline_costs.model_costs import ModelCosts
from shardline_scheduler.events import SequenceFinished
from shardline_server.tokenize import Tokens
from tests.chain import complete, generate, load_chain, requests
from tests.gguf_models import write_gguf
from tests.models import VOCAB_SIZE
from tests.mxfp4_models import FILE, Experts, save_mxfp4
from tests.pinned import first_core
from tests.unit.tokenize.small_tokenizers import byte_level

LAYER = "model.layers.1.mlp.experts.down_proj"


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    with first_core(tmp_path / "locks") as device:
        yield device


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


def stored_of(info: ModelInfo) -> dict[str, StoredExperts]:
    layers = range(info.num_layers)
    make = partial(build_skeleton, info, layers, dtype=torch.bfloat16, attn_implementation="eager")
    return dict(mxfp4_experts(info, make))


def test_groups_hold_the_numbers_of_every_expert(tmp_path: Path) -> None:
    whole, packed = save_mxfp4(tmp_path)
    expected = load_file(whole / FILE)

    found = stored_of(ModelInfo.read(packed))

    names = {name for name in expected if name.endswith((".gate_up_proj", ".down_proj"))}
    assert found.keys() == names
    for name, stored in found.items():
        rows = expected[name].float().mT.flatten(0, 1)
        assert stored.shape == expected[name].shape
        assert stored.num_bytes == rows.numel() * INT8_BYTES
        assert torch.equal(stored.groups().floats(), rows)
        share = stored.rows(range(70, 200)).rows(range(3, 50))
        assert torch.equal(share.groups().floats(), rows[73:120])


MXFP4 = GGMLQuantizationType.MXFP4
IN_MXFP4 = {f"ffn_{part}_exps": MXFP4 for part in ("gate", "up", "down")}


def test_a_gguf_file_holds_experts_as_they_are_published(device: Device, tmp_path: Path) -> None:
    whole, packed = save_mxfp4(tmp_path)
    file = write_gguf(whole, tmp_path / "model.gguf", others=IN_MXFP4)
    info = ModelInfo.read(file, cache_folder=tmp_path)

    found, expected = stored_of(info), stored_of(ModelInfo.read(packed))

    assert found.keys() == expected.keys()
    for name, stored in found.items():
        assert stored.shape == expected[name].shape
        rows = expected[name].groups().floats()
        assert torch.equal(stored.groups().floats(), rows)
        share = stored.rows(range(71, 200)).rows(range(3, 50))
        assert torch.equal(share.groups().floats(), rows[74:121])
    floats = with_floats(info, range(4), torch.bfloat16, tmp_path).path
    expected_floats = load_file(whole / FILE)
    read = {name: each for file in floats.glob("*.safetensors") for name, each in load(file)}
    assert all(torch.equal(read[name], expected_floats[name]) for name in found)
    greedy = SamplingParams(max_tokens=8, temperature=0.0)
    prompts = [list(range(3, 40)), [5, 9]]
    stages = [load_chain(each, 2, device, tmp_path, dtype="int8") for each in (file, packed)]
    ends = [generate(each, requests(prompts, greedy), budget=32) for each in stages]
    assert ends[0] == ends[1]
    assert ModelCosts.read(file).weight_bytes("int8") == INT8_BYTES


def load(file: Path) -> Iterator[tuple[str, Tensor]]:
    yield from load_file(file).items()


@pytest.mark.parametrize("scale", [0, 1, 127, 252])
def test_groups_hold_every_code_at_small_and_large_scales(scale: int) -> None:
    packed = all_bytes(scale)
    found = in_groups(packed.blocks[0], packed.scales[0]).floats()
    assert torch.equal(found.double(), packed.floats()[0].T)


def test_groups_far_below_the_largest_of_their_output_become_zeros() -> None:
    blocks = torch.full((1, 3, 16), 0x22, dtype=torch.uint8)  # ones
    scales = torch.tensor([[127, 103, 102]], dtype=torch.uint8)
    found = in_groups(blocks, scales).floats()[0, ::32]
    assert found.tolist() == [1, 2.0**-24, 0]


def test_groups_with_a_scale_that_leaves_bfloat16_are_refused(tmp_path: Path) -> None:
    _, packed = save_mxfp4(tmp_path)
    scales = torch.full((5, 64, 3), 255, dtype=torch.uint8)
    change(packed, f"{LAYER}_scales", scales)
    stored = stored_of(ModelInfo.read(packed))[LAYER]
    with pytest.raises(Invalid, match=re.escape(f"{LAYER} cannot be unpacked: a scale is not")):
        stored.groups()


@pytest.mark.parametrize("shape", [None, [5, 64, 2]])
def test_groups_without_scales_for_all_blocks_are_refused_with_their_layer(
    shape: list[int] | None, tmp_path: Path
) -> None:
    _, packed = save_mxfp4(tmp_path)
    new = None if shape is None else torch.zeros(shape, dtype=torch.uint8)
    change(packed, f"{LAYER}_scales", new)
    with pytest.raises(Invalid, match=re.escape(f"{LAYER} cannot be unpacked")):
        stored_of(ModelInfo.read(packed))


@torch.inference_mode()
def test_experts_in_int8_say_what_float_ones_say_but_for_rounded_inputs(
    device: Device, tmp_path: Path
) -> None:
    # Given experts of a layer in float32, and the same ones as a stage of int8 packs them
    whole, packed = save_mxfp4(tmp_path)
    (exact,), (found,) = (
        load_chain(path, 1, device, tmp_path / dtype, dtype=dtype)
        for path, dtype in ((whole, "float32"), (packed, "int8"))
    )
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(40, 64, generator=generator)
    chosen = torch.rand(40, 5, generator=generator).topk(2).indices
    shares = torch.rand(40, 2, generator=generator)

    # When both are asked
    def said(stage: Executor, dtype: torch.dtype) -> Tensor:
        layer: Any = stage.forward.shard.layer_modules[1]
        out: Tensor = layer.mlp.experts(rows.to(dtype), chosen, shares.to(dtype))
        return out.float()

    expected = said(exact, torch.float32)
    wrong = (said(found, torch.bfloat16) - expected).norm() / expected.norm()

    # Then no weight was rounded, and no file of floats has their values
    assert wrong < 0.02
    (floats,) = (tmp_path / "int8" / "floats").glob("*-rest")
    status = (floats / "layer-1.safetensors").stat()
    assert status.st_blocks * 512 < 0.6 * status.st_size
    weights = load_file(whole / FILE)
    layer: Any = found.forward.shard.layer_modules[1]
    for expert, packed_layer in enumerate(layer.mlp.experts.gate_up_proj):
        assert packed_layer.tiles.nbytes == 64 * 192 * 34 // 32
        weight = weights["model.layers.1.mlp.experts.gate_up_proj"][expert].T
        assert torch.equal(packed_layer.weights_of(torch.arange(192)), weight)


def completions(stages: list[Executor], seats: int) -> list[SequenceFinished]:
    generator = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
        for length in (1, 5, 40, 17)
    ]
    params = SamplingParams(max_tokens=8, temperature=0.9, logprobs=1)
    return complete(stages, requests(prompts, params), budget=24, seats=seats)


def test_every_split_batch_and_streamed_layers_of_int8_give_the_same_bits(
    device: Device, tmp_path: Path
) -> None:
    _, packed = save_mxfp4(tmp_path)
    streamed: dict[str, Any] = {"streamed_layers": 2, "streamed_folder": tmp_path}
    cases: list[tuple[int, dict[str, Any]]] = [(1, {}), (2, {}), (1, streamed)]
    found = []
    for num_stages, limits in cases:
        stages = load_chain(packed, num_stages, device, tmp_path, dtype="int8", **limits)
        assert all(stage.exact for stage in stages)
        found += [completions(stages, seats) for seats in (4, 1)]
    assert found[1:] == found[:1] * 5


def test_parts_of_another_dtype_are_refused() -> None:
    blocks, scales = Experts.drawn(1, 32, 8, seed=1)
    with pytest.raises(ValueError, match=re.escape("are torch.uint8 and torch.int32, not bytes")):
        unpacked(blocks, scales.int())


def test_a_folder_as_published_is_registered_with_its_template_and_planned(tmp_path: Path) -> None:
    # Given a tokenizer and a template with the marks of gpt-oss beside the weights
    _, packed = save_mxfp4(tmp_path)
    byte_level().save(str(packed / "tokenizer.json"))
    (packed / "tokenizer_config.json").write_text("{}")
    template = "{% for m in messages %}<|channel|>{{ m.content }}{% endfor %}"
    (packed / "chat_template.jinja").write_text(template)

    row = ModelInfo.read(packed).row(name="m", fingerprint=fingerprint(packed, tmp_path))

    assert row["chat_template"] == template
    assert Tokens.from_row(row).chat.family == "gpt-oss"
    assert list(ModelCosts.read(packed).kinds) == [
        "sliding_attention+experts",
        "full_attention+experts",
    ]
