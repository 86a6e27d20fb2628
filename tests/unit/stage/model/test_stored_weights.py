"""Blocks of GGUF files as the kernels' groups: the numbers of the file, in every split of its
model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from services.stage.model.float_files import with_floats
from services.stage.model.gguf.stored_weights import stored_weights
from services.stage.model.model_info import ModelInfo
from services.stage.model.weights import weight_files
from services.stage.products import groups
from shardline.contract.job import SamplingParams
from tests.chain import complete, generate, load_chain, requests
from tests.gguf_models import write_gguf
from tests.models import VOCAB_SIZE, save_model
from tests.pinned import first_core
from tests.unit.stage.model.test_gguf import K_TYPES, floats

LAYERS = 4
IN_4_BITS = ("Q4_0", "Q4_1", "Q4_K")
OTHERS = {"attn_v": GGMLQuantizationType.Q8_0, "token_embd": GGMLQuantizationType.Q8_0}


def write(folder: Path, name: str) -> ModelInfo:
    """A model with one type for all matrices, or as usual files mix them."""
    model = save_model(folder, "llama-tied", hidden_size=256, head_dim=64, intermediate_size=512)
    path = folder / "model.gguf"
    if name == "mixed":
        write_gguf(model, path, kind=GGMLQuantizationType.Q4_0, others=OTHERS)
    elif name in K_TYPES:
        write_gguf(model, path, raw=GGMLQuantizationType[name])
    else:
        write_gguf(model, path, kind=GGMLQuantizationType[name])
    return ModelInfo.read(path, cache_folder=folder)


@pytest.mark.parametrize("name", [*IN_4_BITS, "Q5_1", "Q8_0", "Q6_K", "Q3_K"])
def test_groups_mean_the_weights_of_the_file(name: str, tmp_path: Path) -> None:
    info = write(tmp_path, name)
    expected = floats(with_floats(info, range(LAYERS), torch.float32, tmp_path).path)

    stored = stored_weights(weight_files(info.path), info.config)

    assert stored.keys() == {each for each, weight in expected.items() if weight.dim() == 2}
    for each, weight in stored.items():
        found, exact = weight.groups(), expected[each]
        assert isinstance(found, groups.Int4Groups) is (name in IN_4_BITS)
        largest = exact.unflatten(1, (-1, groups.GROUP)).abs().amax(2).repeat_interleave(32, 1)
        # Scales are in half precision; only other blocks are rounded to 8 bits.
        share = 2**-9 if name in IN_4_BITS else 0 if name == "Q8_0" else 0.51 / 127
        smallest = 128 * 2**-24 * found.outputs[:, None]  # scales of groups far below an output's
        wrong = (found.floats() - exact).abs()
        assert (wrong <= share * largest + smallest).all(), each
        assert torch.equal(weight.rows(range(16, 48)).groups().floats(), found.floats()[16:48])
        bytes_each = groups.INT4_BYTES if name in IN_4_BITS else groups.INT8_BYTES
        assert weight.num_bytes == exact.numel() * bytes_each


def test_inputs_in_another_order_stand_where_the_file_has_them(tmp_path: Path) -> None:
    model = save_model(tmp_path, "qwen3.5")
    path = write_gguf(model, tmp_path / "model.gguf", kind=GGMLQuantizationType.Q8_0)
    info = ModelInfo.read(path, cache_folder=tmp_path)
    expected = floats(with_floats(info, range(LAYERS), torch.float32, tmp_path).path)

    stored = stored_weights(weight_files(info.path), info.config)

    moved = {each for each, weight in stored.items() if weight.order is not None}
    assert moved == {f"model.layers.{layer}.linear_attn.out_proj.weight" for layer in (0, 2)}
    for each, weight in stored.items():
        order = weight.order
        found = weight.groups().floats()
        own = found if order is None else found[:, order.argsort()]
        assert torch.allclose(own, expected[each], atol=2e-4), each
    greedy = SamplingParams(max_tokens=8, temperature=0.0)
    with first_core(tmp_path / "locks") as device:
        for stages in (1, 2):
            chain = load_chain(path, stages, device, tmp_path, dtype="int4")
            assert len(generate(chain, requests([[5, 9, 7]], greedy), budget=32)[0]) == 8


def test_no_norm_in_rows_and_no_convolution_is_a_matrix(tmp_path: Path) -> None:
    model = save_model(tmp_path, "granitemoehybrid", mamba_d_conv=32)
    path = write_gguf(model, tmp_path / "model.gguf", kind=GGMLQuantizationType.Q8_0)
    info = ModelInfo.read(path, cache_folder=tmp_path)
    ends = {name.rpartition(".layers.")[2] for name in stored_weights([path], info.config)}
    assert "0.mamba.out_proj.weight" in ends
    assert ends.isdisjoint({"0.mamba.norm.weight", "0.mamba.conv1d.weight"})


def test_weights_that_lie_in_the_file_take_no_disk(tmp_path: Path) -> None:
    info = write(tmp_path, "Q4_0")
    stored = stored_weights(weight_files(info.path), info.config)

    rest = with_floats(info, range(LAYERS), torch.bfloat16, tmp_path, stored=stored)
    whole = with_floats(info, range(LAYERS), torch.bfloat16, tmp_path)

    found, expected = floats(rest.path), floats(whole.path)
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        assert torch.equal(weight, expected[name] if name not in stored else 0 * expected[name])
    for file in rest.path.glob("*.safetensors"):
        status = file.stat()
        assert status.st_blocks * 512 <= 3 * 4096 < status.st_size


@pytest.mark.parametrize("name", ["mixed", "Q4_K"])
def test_every_split_and_streamed_layers_give_the_same_bits(name: str, tmp_path: Path) -> None:
    info = write(tmp_path, name)
    sampled = SamplingParams(max_tokens=8, temperature=0.9, logprobs=1)
    generator = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
        for length in (1, 5, 40, 17)
    ]
    found = []
    with first_core(tmp_path / "locks") as device:
        streamed: dict[str, Any] = {"streamed_layers": 3, "streamed_folder": tmp_path}
        cases: list[tuple[int, dict[str, Any]]] = [(1, {}), (2, {}), (1, streamed)]
        for num_stages, limits in cases:
            stages = load_chain(info.path, num_stages, device, tmp_path, dtype="int4", **limits)
            assert all(stage.exact for stage in stages)
            found.append(complete(stages, requests(prompts, sampled), budget=24, seats=4))
    assert found[1:] == found[:1] * 2
