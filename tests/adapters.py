"""LoRA adapters in PEFT's format for the tiny models, and the models that they mean with their
weights merged."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.stage.model.weights import check_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
DEFAULTS: dict[str, Any] = {
    "auto_mapping": None,
    "base_model_name_or_path": "any",
    "bias": "none",
    "fan_in_fan_out": False,
    "init_lora_weights": True,
    "layer_replication": None,
    "lora_bias": False,
    "lora_dropout": 0.05,
    "loftq_config": {},
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_type": "LORA",
    "qalora_group_size": 16,
    "rank_pattern": {},
    "alpha_pattern": {},
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_dora": False,
    "use_rslora": False,
}
"""As PEFT saves them."""


def save_adapter(
    model: Path,
    folder: Path,
    *,
    targets: tuple[str, ...] = ALL,
    rank: int = 4,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Writes an adapter for the linear layers of a model whose names end so. Large enough that
    tokens differ."""
    found = {
        **DEFAULTS,
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(targets),
        **config,
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = dict[str, Tensor]()
    for layer, (num_outputs, num_inputs) in _linear_shapes(model).items():
        if layer.endswith(targets):
            r = next(
                (value for key, value in found["rank_pattern"].items() if layer.endswith(key)), rank
            )
            tensors[f"{PREFIX}{layer}.lora_A.weight"] = (
                torch.randn(r, num_inputs, generator=generator) * 0.2
            )
            tensors[f"{PREFIX}{layer}.lora_B.weight"] = (
                torch.randn(num_outputs, r, generator=generator) * 0.2
            )
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(found))
    return folder


def change_config(folder: Path, **changes: Any) -> None:
    """Writes other values into an adapter's config."""
    path = folder / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def rename_tensors(folder: Path, old: str, new: str) -> None:
    """Writes other names into an adapter's weights."""
    tensors = load_file(folder / WEIGHTS)
    save_file({name.replace(old, new): each for name, each in tensors.items()}, folder / WEIGHTS)


def merged(model: Path, adapter: Path) -> Any:
    """The model by transformers, with the adapter's products added to its weights."""
    config = json.loads((adapter / CONFIG).read_text())
    tensors = load_file(adapter / WEIGHTS)
    whole = tf.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for name in [name for name in tensors if name.endswith(".lora_A.weight")]:
        layer = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        down = tensors[name]
        up = tensors[name.replace("lora_A", "lora_B")]
        alpha = next(
            (v for key, v in config["alpha_pattern"].items() if layer.endswith(key)),
            config["lora_alpha"],
        )
        scale = alpha / (math.sqrt(len(down)) if config["use_rslora"] else len(down))
        whole.get_submodule(layer).weight.data += scale * up @ down
    return whole.eval()


def _linear_shapes(model: Path) -> dict[str, list[int]]:
    tensors = check_file(model / "model.safetensors").tensors
    return {
        name.removesuffix(".weight"): one["shape"]
        for name, one in tensors.items()
        if len(one["shape"]) == 2
    }
