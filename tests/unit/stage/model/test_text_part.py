"""Of a multimodal checkpoint only the language model is loaded, counted and converted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.stage.model.float_files import with_floats
from services.stage.model.model_info import ModelInfo
from services.stage.model.shard import Shard, build_skeleton
from services.stage.model.text_part import other_parts
from services.stage.model.weights import check_file, weight_files
from shardline_costs import ModelCosts
from tests.models import edit_config
from tests.multimodal_models import save_container

CPU = torch.device("cpu")
CONTAINERS = ["gemma3-vision", "qwen2-vl", "llava-next", "phi4-multimodal", "gemma3n"]


@pytest.mark.parametrize("name", CONTAINERS)
def test_other_parts_are_neither_loaded_nor_counted(name: str, tmp_path: Path) -> None:
    info = ModelInfo.read(save_container(tmp_path, name))
    layers = range(info.num_layers)
    skeleton = build_skeleton(info, layers, dtype=torch.float32, attn_implementation="eager")
    shard = Shard.load(info, layers, dtype=torch.float32, attn_implementation="eager", device=CPU)
    stored = {each for file in weight_files(info.path) for each in check_file(file).tensors}

    loaded = {each for each, _ in shard.model.named_parameters()}
    others = other_parts(info.config)
    assert others
    assert all(others.isdisjoint(each.split(".")) for each in loaded)
    assert any(not others.isdisjoint(each.split(".")) for each in stored)
    assert {each for each, _ in skeleton.named_parameters()} >= loaded
    assert len(shard.layer_modules) == info.num_layers


def test_a_planner_counts_the_text_of_a_multimodal_model_alone(tmp_path: Path) -> None:
    path = save_container(tmp_path, "gemma3-vision")
    text = json.loads((path / "config.json").read_text())["text_config"]
    assert ModelCosts.read(path).num_weights == ModelCosts.of(text).num_weights


def test_a_planner_does_not_cut_layers_that_stay_together(tmp_path: Path) -> None:
    whole = ModelCosts.read(save_container(tmp_path, "gemma4-joined"))
    assert whole.joined_from == 0
    assert ModelCosts.read(save_container(tmp_path, "gemma4-vision")).joined_from is None


def test_a_planner_knows_layers_that_differ_in_their_heads(tmp_path: Path) -> None:
    path = save_container(tmp_path, "gemma4-vision")
    saved = ModelCosts.read(path)
    text = json.loads((path / "config.json").read_text())["text_config"]
    text.pop("per_layer_config")

    as_released = ModelCosts.of({"text_config": {**text, "global_head_dim": 32}})

    assert [kind.kv_numbers for kind in saved.layers] == [64, 64, 128] * 2
    assert as_released.layers == saved.layers


def test_names_of_tensors_are_known_as_released_and_as_modules_have_them(tmp_path: Path) -> None:
    path = save_container(tmp_path, "gemma3-vision")
    file = path / "model.safetensors"
    tensors = load_file(file)
    expected = {name: weight.clone() for name, weight in _weights(path).items()}
    renamed = {
        name.replace("language_model.model.", "model.language_model."): tensor.clone()
        for name, tensor in tensors.items()
    }
    file.unlink()
    save_file(renamed, file, metadata={"format": "pt"})

    found = _weights(path)

    assert renamed.keys() != tensors.keys()
    assert found.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in found.items())


def _weights(path: Path) -> dict[str, torch.Tensor]:
    info = ModelInfo.read(path)
    dtype = torch.float32
    shard = Shard.load(info, range(1), dtype=dtype, attn_implementation="eager", device=CPU)
    return dict(shard.model.named_parameters())


def test_float_files_hold_the_language_model_alone(tmp_path: Path) -> None:
    info = ModelInfo.read(save_container(tmp_path, "gemma3-vision", torch.bfloat16))
    floats = with_floats(info, range(2), torch.float32, tmp_path, converts=True)

    written = {name for file in weight_files(floats.path) for name in check_file(file).tensors}
    assert all(other_parts(info.config).isdisjoint(name.split(".")) for name in written)
    layers = range(2)
    Shard.load(floats, layers, dtype=torch.float32, attn_implementation="eager", device=CPU)


def test_the_end_of_a_sequence_may_stand_in_the_text_config(tmp_path: Path) -> None:
    path = save_container(tmp_path, "mistral3")
    config = json.loads((path / "config.json").read_text())
    config.pop("eos_token_id", None)
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").unlink(missing_ok=True)
    assert ModelInfo.read(path).eos_ids == (2,)
    edit_config(path, eos_token_id=[5, 6])
    assert ModelInfo.read(path).eos_ids == (5, 6)
