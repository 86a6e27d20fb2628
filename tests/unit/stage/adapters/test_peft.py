"""Folders of adapters: what is read from one, and what is refused by name."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from services.stage.adapters.adapter_watch import AdapterWatch
from services.stage.adapters.peft import AdapterFolder, LowRank
from services.stage.model.shard import LinearSize
from shardline.base.errors import Invalid, Unavailable
from tests.adapters import CONFIG, PREFIX, WEIGHTS, change_config, rename_tensors, save_adapter
from tests.models import save_model

QUERY = "model.layers.0.self_attn.q_proj"
LAST = "model.layers.3.mlp.down_proj"
SIZES = {QUERY: LinearSize(32, 32), LAST: LinearSize(48, 32)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def adapter(model: Path, tmp_path: Path) -> Path:
    """For the query projection of the first layer, and the last layer's down projection."""
    return save_adapter(
        model,
        tmp_path / "adapters" / "a",
        targets=("layers.0.self_attn.q_proj", "layers.3.mlp.down_proj"),
    )


@pytest.fixture
def folder(adapter: Path, tmp_path: Path) -> AdapterFolder:
    return AdapterFolder(adapter.parent, SIZES, tmp_path)


def reason(folder: AdapterFolder, name: str = "a") -> str:
    with pytest.raises(Invalid) as refused:
        folder.get(name)
    assert refused.value.field == "model"
    return refused.value.problem


def test_an_adapter_is_read_with_ranks_and_scales(folder: AdapterFolder, adapter: Path) -> None:
    change_config(adapter, alpha_pattern={"mlp.down_proj": 3})

    found = folder.get("a")

    assert found.layers == {
        QUERY: LowRank(rank=4, scale=2.0),
        "model.layers.3.mlp.down_proj": LowRank(rank=4, scale=0.75),
    }
    assert folder.names() == ["a"]
    assert folder.known() == {"a": found.fingerprint}


def test_the_fingerprint_is_that_of_both_files(folder: AdapterFolder, adapter: Path) -> None:
    first = folder.get("a").fingerprint
    change_config(adapter, lora_alpha=16)
    second = folder.get("a").fingerprint
    tensors = load_file(adapter / WEIGHTS)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, adapter / WEIGHTS)
    third = folder.get("a").fingerprint

    assert len({first, second, third}) == 3


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"use_dora": True}, "adapter 'a': use_dora is set, which is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
        ({"some_later_variant": {"x": 1}}, "some_later_variant is set"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        (
            {"init_lora_weights": "pissa"},
            "init_lora_weights is 'pissa', which changes the base's weights",
        ),
        ({"rank_pattern": {"layers.0.*": 3}}, "rank_pattern has the expression 'layers.0.*'"),
        ({"r": 5}, f"{QUERY} has rank 4, its config says 5"),
        ({"lora_alpha": None}, "is broken"),
    ],
)
def test_configs_that_mean_more_are_refused_by_name(
    changes: dict[str, Any], problem: str, folder: AdapterFolder, adapter: Path
) -> None:
    change_config(adapter, **changes)

    assert problem in reason(folder)


@pytest.mark.parametrize(
    ("layer", "shapes", "problem"),
    [
        (
            "model.layers.9.self_attn.q_proj",
            [(4, 32), (32, 4)],
            "the model has no linear layer model.layers.9",
        ),
        ("lm_head", [(4, 32), (96, 4)], "the model has no linear layer lm_head within its layers"),
        (
            QUERY,
            [(4, 64), (64, 4)],
            f"{QUERY} has the shapes [4, 64] and [64, 4], this model needs [[4, 32], [32, 4]]",
        ),
        (QUERY, [(4, 32)], f"{QUERY} lacks lora_B.weight"),
        (QUERY, [(600, 32), (32, 600)], "has rank 600 of F32"),
        (
            "model.embed_tokens.lora_embedding_A",
            [],
            "embed_tokens.lora_embedding_A is not supported",
        ),
    ],
)
def test_weights_of_other_models_and_layers_are_refused_by_name(
    layer: str, shapes: list[tuple[int, ...]], problem: str, folder: AdapterFolder, adapter: Path
) -> None:
    names = (f"{PREFIX}{layer}.lora_A.weight", f"{PREFIX}{layer}.lora_B.weight")
    tensors = {name: torch.zeros(shape) for name, shape in zip(names, shapes, strict=False)}
    save_file(tensors or {f"{PREFIX}{layer}": torch.zeros(4, 96)}, adapter / WEIGHTS)

    assert problem in reason(folder)


@pytest.mark.parametrize(("old", "new"), [(".weight", ".default.weight"), (PREFIX, "")])
def test_names_of_a_state_dict_or_without_prefix_mean_the_layers(
    old: str, new: str, folder: AdapterFolder, adapter: Path
) -> None:
    expected = folder.get("a").layers
    rename_tensors(adapter, old, new)

    assert folder.get("a").layers == expected


def test_a_file_of_two_adapters_is_refused_with_the_way_to_save_one(
    folder: AdapterFolder, adapter: Path
) -> None:
    rename_tensors(adapter, ".weight", ".other.weight")
    with pytest.raises(Invalid, match=r"lora_A\.other\.weight is not supported") as refused:
        folder.get("a")
    assert refused.value.remedy == "Save this adapter alone, with PEFT's save_pretrained"


def test_folders_that_are_no_adapters_are_refused(
    folder: AdapterFolder, adapter: Path, tmp_path: Path
) -> None:
    assert "it needs adapter_config.json and adapter_model.safetensors" in reason(folder, "b")
    assert "a name has letters, digits" in reason(folder, "../adapters/a")
    assert "SHARDLINE_ADAPTERS_DIR is not set" in reason(AdapterFolder(None, SIZES, tmp_path))
    (adapter / CONFIG).write_text("[]")
    assert "is broken" in reason(folder)
    (adapter / WEIGHTS).write_bytes(b"cut")
    shutil.copy(adapter / WEIGHTS, adapter / CONFIG)
    assert "is broken" in reason(folder)


def test_a_watch_tells_what_comes_changes_and_goes(
    folder: AdapterFolder, adapter: Path, model: Path
) -> None:
    # Given a watch that has told of one adapter
    told: list[Mapping[str, str]] = []
    watch = AdapterWatch(folder, every_s=60.0, tell=told.append)
    watch.look()
    watch.look()
    assert [found.keys() for found in told] == [{"a"}]

    # When another one comes, one that does not fit, and the first one goes
    save_adapter(model, adapter.parent / "b", targets=("layers.0.self_attn.q_proj",), seed=7)
    save_adapter(model, adapter.parent / "wide")
    shutil.rmtree(adapter)
    with capture_logs() as logs:
        watch.look()
        watch.look()

    # Then the fitting one is told, and the other one is warned of once
    assert [found.keys() for found in told] == [{"a"}, {"b"}]
    assert [entry["adapter"] for entry in logs if entry["event"] == "adapter refused"] == ["wide"]


def test_a_watch_that_is_started_has_told_what_there_is(folder: AdapterFolder) -> None:
    told: list[Mapping[str, str]] = []
    watch = AdapterWatch(folder, every_s=60.0, tell=told.append)

    watch.start()

    assert [found.keys() for found in told] == [{"a"}]
    assert folder.known() == told[0]
    watch.stop()
    watch.join()


def test_a_watch_tells_again_what_could_not_be_told(folder: AdapterFolder) -> None:
    told: list[Mapping[str, str]] = []

    def tell(found: Mapping[str, str]) -> None:
        told.append(found)
        if len(told) == 1:
            raise Unavailable("postgres unreachable")

    watch = AdapterWatch(folder, every_s=60.0, tell=tell)
    watch.look()
    watch.look()
    watch.look()

    assert len(told) == 2
