"""Quantized checkpoints load as the float checkpoints that mean the same, to the last bit, whole or
cut into stages."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.stage.device.device import Device
from services.stage.model import float_files
from services.stage.model.float_files import with_floats
from services.stage.model.model_info import ModelInfo
from services.stage.model.weights import INDEX, fingerprint
from shardline.base.errors import Invalid
from shardline.contract.job import SamplingParams
from tests.chain import generate, load_chain, requests
from tests.models import edit_config, save_model
from tests.multimodal_models import save_container
from tests.pinned import first_core
from tests.unit.stage.model.packed_models import (
    FILE,
    Pack,
    awq,
    fp8,
    gptq,
    gptq_dynamic,
    int8_rows,
    packed_integers,
    plain,
    save_both,
)

COMPRESSED = {"quant_method": "compressed-tensors"}
FORMATS: dict[str, tuple[Pack, dict[str, Any]]] = {
    "gptq": (gptq(), {"quant_method": "gptq", "bits": 4}),
    "gptq-8": (gptq(8), {"quant_method": "gptq", "bits": 8}),
    "gptq-zeros": (gptq(borrows=True), {"quant_method": "gptq", "bits": 4}),
    "gptq-8-zeros": (gptq(8, borrows=True), {"quant_method": "gptq", "bits": 8}),
    "gptq-dynamic": (
        gptq_dynamic,
        {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down_proj.*": {"bits": 8}}},
    ),
    "gptq-reordered": (gptq(reordered=True), {"quant_method": "gptq", "bits": 4, "desc_act": True}),
    "gptq-v2": (gptq(less=0), {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}),
    "awq": (awq(), {"quant_method": "awq", "bits": 4, "version": "gemm"}),
    "packed-4": (
        packed_integers(4, group=16, symmetric=True),
        {**COMPRESSED, "format": "pack-quantized"},
    ),
    "packed-4-zeros": (
        packed_integers(4, group=16, symmetric=False),
        {**COMPRESSED, "format": "pack-quantized"},
    ),
    "packed-8-rows": (
        packed_integers(8, group=None, symmetric=True),
        {**COMPRESSED, "format": "pack-quantized"},
    ),
    "packed-4-reordered": (
        packed_integers(4, group=16, symmetric=False, reordered=True),
        {**COMPRESSED, "format": "pack-quantized"},
    ),
    "int8": (int8_rows, {**COMPRESSED, "format": "int-quantized"}),
    "fp8-rows": (fp8(None), {**COMPRESSED, "format": "float-quantized"}),
    "fp8-blocks-text": (
        fp8(20, "weight_scale"),
        {
            **COMPRESSED,
            "format": "float-quantized",
            "config_groups": {"group_0": {"weights": {"block_structure": "20x20"}}},
        },
    ),
    "dense": (plain, {**COMPRESSED, "format": "dense", "config_groups": {}}),
    "fp8-blocks": (fp8(20), {"quant_method": "fp8", "weight_block_size": [20, 20]}),
}


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    with first_core(tmp_path / "locks") as device:
        yield device


@pytest.fixture(params=FORMATS)
def both(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A model with float weights, and the same one quantized."""
    return save_both(tmp_path, *FORMATS[request.param])


def floats(packed: Path, layers: range, dtype: torch.dtype, cache: Path) -> dict[str, torch.Tensor]:
    folder = with_floats(ModelInfo.read(packed), layers, dtype, cache).path
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return {
        name: tensor
        for file in set(index.values())
        for name, tensor in load_file(folder / file).items()
    }


def test_every_weight_is_what_the_format_means(both: tuple[Path, Path], tmp_path: Path) -> None:
    whole, packed = both
    expected = load_file(whole / FILE)
    found = floats(packed, range(4), torch.float32, tmp_path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_tokens_are_those_of_the_float_model_in_one_stage_and_in_three(
    dtype: str, device: Device, tmp_path: Path
) -> None:
    whole, packed = save_both(tmp_path, *FORMATS["awq"])
    wanted = requests([range(5, 40), range(50, 60)], SamplingParams(max_tokens=20, temperature=0.0))
    expected = generate(load_chain(whole, 1, device, tmp_path, dtype=dtype), wanted, budget=32)
    for num_stages in (1, 3):
        assert (
            generate(
                load_chain(packed, num_stages, device, tmp_path, dtype=dtype), wanted, budget=32
            )
            == expected
        )


def test_files_are_written_once_and_hold_the_layers_of_one_shard(tmp_path: Path) -> None:
    _, packed = save_both(tmp_path, *FORMATS["gptq"])
    info = ModelInfo.read(packed)
    first = with_floats(info, range(2), torch.bfloat16, tmp_path)
    before = {file: file.stat().st_mtime_ns for file in first.path.parent.glob("*.safetensors")}
    assert {file.name for file in before} == {
        f"{part}.safetensors" for part in ("rest", "layer-0", "layer-1")
    }
    second = with_floats(info, range(1, 4), torch.bfloat16, tmp_path)
    assert {file: file.stat().st_mtime_ns for file in before} == before
    assert len(list(second.path.glob("*.safetensors"))) == 4
    assert fingerprint(packed, tmp_path) == fingerprint(info.path, tmp_path), (
        "the checkpoint's own stays"
    )


def test_a_stage_that_reads_the_files_never_sees_half_of_one(tmp_path: Path) -> None:
    # Given files that one stage has just opened
    _, packed = save_both(tmp_path, *FORMATS["gptq"])
    model = ModelInfo.read(packed)
    found = with_floats(model, range(2), torch.float32, tmp_path).path
    before = {name: (found / name).read_text() for name in (INDEX, "config.json")}
    with ExitStack() as stack:
        opened = {name: stack.enter_context((found / name).open()) for name in before}

        # When another one of the same layers starts
        with_floats(model, range(2), torch.float32, tmp_path)

        # Then the first reads what it has opened, whole
        assert all(
            (found / name).stat().st_ino != os.fstat(file.fileno()).st_ino
            for name, file in opened.items()
        )
        assert {name: file.read() for name, file in opened.items()} == before


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"quant_method": "bitsandbytes"}, "it is quantized by bitsandbytes"),
        ({"quant_method": "gptq", "bits": 3}, "quantization_config has bits 3, not 4 or 8"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv', not gemm"),
        ({"bits": 4, "group_size": 64}, "it is quantized by MLX"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "its words are Marlin's"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            "checkpoint_format 'marlin', not gptq",
        ),
        (
            {**COMPRESSED, "format": "dense", "sparsity_config": {"format": "sparse-24-bitmask"}},
            "its sparsity_config has format 'sparse-24-bitmask', not dense",
        ),
        (
            {**FORMATS["fp8-blocks"][1], "weight_block_size": "20"},
            "quantization_config has blocks of '20', not rows and columns",
        ),
        (
            {**COMPRESSED, "format": "nvfp4-pack-quantized"},
            "format 'nvfp4-pack-quantized', not int-quantized",
        ),
        (
            {
                **COMPRESSED,
                "format": "int-quantized",
                "transform_config": {"config_groups": {"u": {"type": "hadamard", "apply": []}}},
            },
            "quantization_config has a transform_config",
        ),
    ],
)
def test_other_formats_are_refused_by_name(
    config: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    _, packed = save_both(tmp_path, FORMATS["awq"][0], config)
    with pytest.raises(Invalid, match=problem) as refused:
        ModelInfo.read(packed)
    assert (
        refused.value.remedy
        == "Give the float checkpoint, or one in compressed-tensors, GPTQ, AWQ, fp8 or MXFP4"
    )


def test_mlx_is_refused_by_the_field_that_it_writes(tmp_path: Path) -> None:
    path = save_model(tmp_path)
    edit_config(path, quantization={"bits": 4, "group_size": 64})
    with pytest.raises(Invalid, match="it is quantized by MLX"):
        ModelInfo.read(path)


def test_awq_without_zero_points_is_refused_by_name(tmp_path: Path) -> None:
    _, packed = save_both(tmp_path, *FORMATS["awq"])
    tensors = load_file(packed / FILE)
    kept = {name: each for name, each in tensors.items() if not name.endswith("qzeros")}
    save_file(kept, packed / FILE, metadata={"format": "pt"})
    with pytest.raises(Invalid, match=r"quantized by AWQ without zero points \(qzeros\)"):
        with_floats(ModelInfo.read(packed), range(2), torch.bfloat16, tmp_path)


@pytest.mark.parametrize("name", ["int8", "packed-4"])
def test_a_compression_config_is_read_as_quantization_config(name: str, tmp_path: Path) -> None:
    pack, config = FORMATS[name]
    whole, packed = save_both(tmp_path, pack, config)
    edit_config(packed, quantization_config=None, compression_config=config)

    found = floats(packed, range(4), torch.float32, tmp_path)

    expected = load_file(whole / FILE)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    info = with_floats(ModelInfo.read(packed), range(4), torch.float32, tmp_path)
    assert "compression_config" not in (info.path / "config.json").read_text()


def test_experts_in_one_tensor_are_multiplied_by_the_scales_of_their_blocks(
    tmp_path: Path,
) -> None:
    path = save_model(tmp_path, "llama")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    made = [fp8(20)(torch.Size((30, 50)), torch.Generator().manual_seed(n)) for n in range(3)]
    tensors = load_file(path / FILE)
    for behind, part in (("", "weight"), ("_scale_inv", "weight_scale_inv")):
        tensors[f"{name}{behind}"] = torch.stack([each.tensors[part] for each in made])
    save_file(tensors, path / FILE, metadata={"format": "pt"})
    edit_config(path, quantization_config=FORMATS["fp8-blocks"][1])

    found = floats(path, range(4), torch.float32, tmp_path)

    assert torch.equal(found[name], torch.stack([each.weight for each in made]))
    assert f"{name}_scale_inv" not in found


@pytest.mark.parametrize("converts", [False, True])
@pytest.mark.parametrize(("name", "dtype"), [("fp8-rows", "F8_E4M3"), ("int8", "I8")])
def test_weights_in_8_bits_without_quantization_config_are_refused(
    name: str, dtype: str, *, converts: bool, tmp_path: Path
) -> None:
    _, packed = save_both(tmp_path, *FORMATS[name])
    edit_config(packed, quantization_config=None)
    with pytest.raises(
        Invalid, match=rf"proj\.weight as {dtype}, which no quantization_config explains"
    ) as refused:
        with_floats(ModelInfo.read(packed), range(4), torch.float32, tmp_path, converts=converts)
    assert "add its quantization_config" in refused.value.remedy


def test_quantization_config_of_the_text_alone_is_read(device: Device, tmp_path: Path) -> None:
    # Given a container whose config says it at the language model
    pack, config = FORMATS["int8"]
    path = save_container(tmp_path, "llava")
    tensors = load_file(path / FILE)
    generator = torch.Generator().manual_seed(3)
    expected = {}
    for name in [each for each in tensors if "language" in each and "_proj.weight" in each]:
        made = pack(tensors[name].shape, generator)
        expected[name] = made.weight
        tensors |= {f"{name[:-7]}.{part}": each for part, each in made.tensors.items()}
    save_file(tensors, path / FILE, metadata={"format": "pt"})
    text = json.loads((path / "config.json").read_text())["text_config"]
    edit_config(path, text_config={**text, "quantization_config": config})

    # Then its weights are what the format means, and its stages load
    found = floats(path, range(4), torch.float32, tmp_path)
    assert expected
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert len(load_chain(path, 2, device, tmp_path)) == 2


@pytest.mark.parametrize("transforms", [None, {}])
def test_a_transform_config_without_content_refuses_no_model(
    transforms: dict[str, Any] | None, tmp_path: Path
) -> None:
    pack, config = FORMATS["int8"]
    _, packed = save_both(tmp_path, pack, {**config, "transform_config": transforms})
    assert ModelInfo.read(packed).num_layers == 4


def test_a_checkpoint_without_a_part_is_refused_with_its_layer(tmp_path: Path) -> None:
    _, packed = save_both(tmp_path, *FORMATS["gptq"])
    tensors = load_file(packed / FILE)
    del tensors["model.layers.1.mlp.up_proj.scales"]
    save_file(tensors, packed / FILE)
    with pytest.raises(Invalid, match=r"layer-1 of .* cannot be unpacked: 'scales'"):
        with_floats(ModelInfo.read(packed), range(2), torch.bfloat16, tmp_path)


def test_a_full_disk_is_told_before_a_file_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, packed = save_both(tmp_path, *FORMATS["gptq"])
    monkeypatch.setattr(float_files, "ROOM", 1e12)
    with pytest.raises(
        Invalid, match=r"SHARDLINE_CACHE_DIR: .*rest\.safetensors needs 0 MiB, the disk has"
    ):
        with_floats(ModelInfo.read(packed), range(2), torch.bfloat16, tmp_path)
