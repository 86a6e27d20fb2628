"""Packed checkpoints as the kernels' groups: the numbers of the file, in every split of its
model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from torch import Tensor

from services.stage.device.device import Device
from services.stage.engine.executor import Executor
from services.stage.kernels.kernel import Weights, load
from services.stage.model.float_files import with_floats
from services.stage.model.model_info import ModelInfo
from services.stage.model.packed_weights import StoredPacked, packed_weights
from services.stage.model.shard import build_skeleton
from services.stage.products import groups
from services.stage.products.packing import packed_bytes, packing_for
from services.stage.products.stored import keep_all
from services.stage.products.tiled_linear import TiledLinear
from shardline.base.errors import Invalid
from shardline.contract.job import SamplingParams
from shardline_scheduler.events import SequenceFinished
from tests.benchmarks.perplexity import WINDOW, Reading, read
from tests.chain import complete, load_chain, requests
from tests.models import VOCAB_SIZE
from tests.pinned import first_core
from tests.unit.stage.model.packed_models import (
    FILE,
    PROJECTIONS,
    Pack,
    Packed,
    awq,
    gptq,
    packed_integers,
    save_both,
)
from tests.unit.stage.model.test_gguf import floats

LAYERS = 3
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "head_dim": 32,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
}
UNEVEN = {"hidden_size": 120, "head_dim": 30, "intermediate_size": 240}
BITS_4: dict[str, Any] = {"quant_method": "gptq", "bits": 4}
BITS_8: dict[str, Any] = {"quant_method": "gptq", "bits": 8}
V2: dict[str, Any] = {**BITS_4, "checkpoint_format": "gptq_v2"}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "version": "gemm"}
PACKED: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
FORMATS: dict[str, tuple[Pack, dict[str, Any]]] = {
    "gptq-32": (gptq(group=32), BITS_4),
    "gptq-32-zeros": (gptq(group=32, borrows=True), BITS_4),
    "gptq-64-symmetric": (gptq(group=64, symmetric=True), BITS_4),
    "gptq-128-v2": (gptq(group=128, less=0), V2),
    "gptq-column": (gptq(group=None), BITS_4),
    "gptq-ordered": (gptq(group=64, alike=True), BITS_4),
    "gptq-ordered-apart": (gptq(group=64, reordered=True), BITS_4),
    "awq-32": (awq(32), AWQ),
    "awq-128": (awq(128), AWQ),
    "awq-column": (awq(None), AWQ),
    "packed-32": (packed_integers(4, group=32, symmetric=False), PACKED),
    "packed-128-symmetric": (packed_integers(4, group=128, symmetric=True), PACKED),
    "packed-rows": (packed_integers(4, group=None, symmetric=False), PACKED),
    "packed-ordered": (packed_integers(4, group=64, symmetric=False, reordered=True), PACKED),
}
IN_8_BITS: dict[str, tuple[Pack, dict[str, Any]]] = {
    "gptq-8": (gptq(8, group=64, symmetric=True), BITS_8),
    "gptq-8-ordered": (gptq(8, group=64, symmetric=True, alike=True), BITS_8),
    "packed-8-rows": (packed_integers(8, group=None, symmetric=True), PACKED),
}
SAMPLED = SamplingParams(max_tokens=8, temperature=0.9, logprobs=1)


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    with first_core(tmp_path / "locks") as device:
        yield device


def skeleton(info: ModelInfo) -> Any:
    layers = range(info.num_layers)
    return build_skeleton(info, layers, dtype=torch.bfloat16, attn_implementation="sdpa")


def stored_of(packed: Path) -> dict[str, StoredPacked]:
    info = ModelInfo.read(packed)
    return dict(packed_weights(info, partial(skeleton, info)))


def in_order(stored: StoredPacked, floats: Tensor) -> Tensor:
    """The inputs as the kernel sees them."""
    return floats if stored.order is None else floats[:, stored.order.long()]


@pytest.mark.parametrize("name", FORMATS)
def test_groups_mean_the_weights_of_the_checkpoint_exactly(name: str, tmp_path: Path) -> None:
    whole, packed = save_both(tmp_path, *FORMATS[name], **SIZES)
    expected = load_file(whole / FILE)
    kernel = load()
    assert kernel is not None

    found = stored_of(packed)

    assert found.keys() == {each for each in expected if each.endswith("_proj.weight")}
    for each, stored in found.items():
        weight = stored.groups()
        exact = expected[each]
        assert torch.equal(weight.floats(), in_order(stored, exact)), each
        assert (stored.order is not None) is ("ordered" in name)
        share = stored.rows(range(20, 52)).rows(range(1, 30))
        assert torch.equal(share.groups().floats(), weight.floats()[21:50])
        of_order = 0 if stored.order is None else 4 * exact.shape[1]
        assert stored.num_bytes == exact.numel() * groups.INT4_BYTES + of_order

        # The product is that of these floats, but for inputs that are rounded to 8 bits
        layer = TiledLinear(kernel, [weight], None, Weights.INT4)
        if stored.order is not None:
            layer.order_inputs(stored.order)
        x = torch.randn(40, exact.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
        wanted = x.float() @ exact.T
        assert (layer(x).float() - wanted).norm() < 0.01 * wanted.norm()


@pytest.mark.parametrize("name", IN_8_BITS)
def test_8_bits_stay_but_for_the_lowest_number(name: str, tmp_path: Path) -> None:
    whole, packed = save_both(tmp_path, *IN_8_BITS[name], **SIZES)
    expected = load_file(whole / FILE)

    for each, stored in stored_of(packed).items():
        weight = stored.groups()
        assert isinstance(weight, groups.Int8Groups)
        wrong = (weight.floats() - in_order(stored, expected[each])).abs()
        # -128 becomes -127, as no instruction takes it
        is_lowest = weight.numbers == -127
        steps = weight.scales.float() * weight.outputs[:, None]
        assert (wrong[~is_lowest] == 0).all()
        assert (wrong <= steps.repeat_interleave(groups.GROUP, 1)).all()
        of_order = 0 if stored.order is None else stored.order.nbytes
        assert stored.num_bytes == expected[each].numel() * groups.INT8_BYTES + of_order


def test_8_bits_with_zero_points_are_rounded_to_8_bits(tmp_path: Path) -> None:
    for number, group in enumerate((64, 16)):
        whole, packed = save_both(
            tmp_path / str(number), gptq(8, group=group, borrows=True), BITS_8, **SIZES
        )
        expected = load_file(whole / FILE)
        for each, stored in stored_of(packed).items():
            weight = stored.groups()
            exact = expected[each]
            largest = exact.unflatten(1, (-1, groups.GROUP)).abs().amax(2).repeat_interleave(32, 1)
            assert ((weight.floats() - exact).abs() <= 0.51 / 127 * largest).all(), each
            share = stored.rows(range(5, 18))
            assert torch.equal(share.groups().floats(), weight.floats()[5:18])


@pytest.mark.parametrize(
    ("group", "sizes", "reason"),
    [
        (16, SIZES, "groups that are no multiple of 32 inputs"),
        (24, {**SIZES, **UNEVEN}, "120 inputs are no multiple of 32"),
    ],
)
def test_other_groups_become_floats_and_the_log_says_so(
    group: int, sizes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    _, packed = save_both(tmp_path, gptq(group=group), BITS_4, **sizes)

    with capture_logs() as logs:
        found = stored_of(packed)

    assert not any(".q_proj." in name for name in found)
    warned = [each for each in logs if "fitted again" in each["event"]]
    assert any(each["reason"].startswith(reason) for each in warned)


def test_weights_under_other_names_become_floats_and_the_log_says_so(tmp_path: Path) -> None:
    _, packed = save_both(tmp_path, gptq(group=32), BITS_4, **SIZES)
    tensors = load_file(packed / FILE)
    renamed = {name.replace("model.", "model.language_model.", 1): x for name, x in tensors.items()}
    save_file(renamed, packed / FILE, metadata={"format": "pt"})

    with capture_logs() as logs:
        assert not stored_of(packed)

    (warned,) = [each for each in logs if "fitted again" in each["event"]]
    assert warned["reason"].startswith("their names")
    assert warned["layers"] == LAYERS * len(PROJECTIONS)


def test_experts_are_fitted_beside_stored_attention(device: Device, tmp_path: Path) -> None:
    sizes = {**SIZES, "moe_intermediate_size": 64}
    _, packed = save_both(tmp_path, gptq(group=32), BITS_4, "qwen3-moe", **sizes)
    assert any(
        ".experts." in name and name.endswith(".qweight") for name in load_file(packed / FILE)
    )

    found = stored_of(packed)
    one, two = (load_chain(packed, num, device, tmp_path, dtype="int4") for num in (1, 2))

    assert found.keys() == {
        f"model.layers.{number}.self_attn.{part}_proj.weight"
        for number in range(LAYERS)
        for part in "qkvo"
    }
    assert completions(one, 4) == completions(two, 4)


def test_a_checkpoint_without_a_part_is_refused_with_its_layer(tmp_path: Path) -> None:
    _, packed = save_both(tmp_path, gptq(group=32), BITS_4, **SIZES)
    tensors = load_file(packed / FILE)
    del tensors["model.layers.1.mlp.up_proj.scales"]
    save_file(tensors, packed / FILE)

    with pytest.raises(Invalid, match=r"layers\.1\.mlp\.up_proj of .* unpacked: 'scales'"):
        stored_of(packed)


def test_packed_weights_take_no_disk_and_a_third_of_the_memory(
    device: Device, tmp_path: Path
) -> None:
    whole, packed = save_both(tmp_path, gptq(group=128), BITS_4, **SIZES)
    info = ModelInfo.read(packed)
    stored = stored_of(packed)

    # The files of floats have what is not packed, and holes
    rest = with_floats(info, range(LAYERS), torch.bfloat16, tmp_path, stored=stored)
    found, expected = floats(rest.path), load_file(whole / FILE)
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        assert torch.equal(weight, expected[name] if name not in stored else 0 * weight), name
    for number in range(LAYERS):
        status = (rest.path / f"layer-{number}.safetensors").stat()
        assert status.st_blocks * 512 <= 3 * 4096 < status.st_size

    # Layers take 0.31 of bfloat16's memory, and what is promised before
    (stage,) = load_chain(packed, 1, device, tmp_path, dtype="int4")
    layers = stage.forward.shard.layer_modules.values()
    products = {
        each for layer in layers for each in layer.modules() if isinstance(each, TiledLinear)
    }
    num_bytes = sum(each.tiles.nbytes for each in products)
    in_bfloat16 = 2 * sum(expected[name].numel() for name in stored)
    assert num_bytes <= 0.32 * in_bfloat16
    model = skeleton(info)
    keep_all(model, stored)
    of_layers = sum(packed_bytes(layer, packing()) for layer in model.model.layers)
    norms = sum(each.nbytes for each in model.model.layers.parameters() if each.dim() == 1)
    assert of_layers == num_bytes + norms


def packing() -> Any:
    return packing_for(torch.bfloat16, load(), Weights.INT4)


def completions(stages: list[Executor], seats: int) -> list[SequenceFinished]:
    generator = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
        for length in (1, 5, 40, 17)
    ]
    return complete(stages, requests(prompts, SAMPLED), budget=24, seats=seats)


@pytest.mark.parametrize(
    "name", ["gptq-128-v2", "gptq-ordered", "gptq-ordered-apart", "awq-32", "packed-ordered"]
)
def test_every_split_batch_and_streamed_layers_give_the_same_bits(
    name: str, device: Device, tmp_path: Path
) -> None:
    _, packed = save_both(tmp_path, *FORMATS[name], **SIZES)
    streamed: dict[str, Any] = {"streamed_layers": 2, "streamed_folder": tmp_path}
    cases: list[tuple[int, dict[str, Any]]] = [(1, {}), (2, {}), (3, {}), (1, streamed)]
    found = []
    for num_stages, limits in cases:
        stages = load_chain(packed, num_stages, device, tmp_path, dtype="int4", **limits)
        assert all(stage.exact for stage in stages)
        found += [completions(stages, seats) for seats in (4, 1)]
    assert found[1:] == found[:1] * 7


def mixed(shape: torch.Size, generator: torch.Generator) -> Packed:
    """8 bits in layers with more inputs than outputs."""
    bits = 8 if shape[0] < shape[1] else 4
    return gptq(bits, group=32, symmetric=True)(shape, generator)


@pytest.mark.parametrize("name", ["mixed", "gptq-ordered", "gptq-ordered-apart", "packed-ordered"])
def test_logits_are_nearer_to_those_of_floats_than_fitted_ones(
    name: str, device: Device, tmp_path: Path
) -> None:
    whole, packed = save_both(tmp_path, *{**FORMATS, "mixed": (mixed, BITS_4)}[name], **SIZES)
    ids = torch.randint(3, VOCAB_SIZE, (1, WINDOW), generator=torch.Generator().manual_seed(3))

    exact, fitted, found = (
        read(load_chain(path, 1, device, tmp_path, dtype=dtype)[0], ids)
        for path, dtype in ((whole, "float32"), (whole, "int4"), (packed, "int4"))
    )

    def divergence(reading: Reading) -> float:
        differences = exact.logprobs - reading.logprobs
        return float((exact.logprobs.exp() * differences).sum(-1).mean())

    assert divergence(found) < min(0.2, divergence(fitted) / 4)
