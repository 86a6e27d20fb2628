"""A tiny gpt-oss as it is published, its experts in MXFP4, and the float checkpoint that means the
same: unpacked number by number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models import edit_config, save_model

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP = 32
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 5}
QUANTIZATION: dict[str, Any] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


class Experts(NamedTuple):
    """The weights of all experts of a layer."""

    blocks: Tensor
    scales: Tensor

    @classmethod
    def drawn(cls, num_experts: int, inputs: int, outputs: int, seed: int) -> Experts:
        """Draws some about as large as the weights of other tests."""
        generator = torch.Generator().manual_seed(seed)
        shape = num_experts, outputs, inputs // GROUP
        return cls(
            torch.randint(256, (*shape, GROUP // 2), generator=generator, dtype=torch.uint8),
            torch.randint(121, 125, shape, generator=generator, dtype=torch.uint8),
        )

    def floats(self) -> Tensor:
        """What they mean, float64 [experts, I, O]."""
        halves = torch.stack((self.blocks & 15, self.blocks >> 4), -1).flatten(3)
        numbers = torch.tensor(VALUES, dtype=torch.float64)[(halves & 7).long()]
        signed = torch.where(halves > 7, -numbers, numbers)
        return (signed * 2.0 ** (self.scales.double() - 127)[..., None]).flatten(2).mT


def save_mxfp4(folder: Path, **changes: Any) -> tuple[Path, Path]:
    """Saves a model in bfloat16 and the same one with packed experts, in two files; returns their
    folders."""
    whole = save_model(folder / "float", "gpt-oss", dtype=torch.bfloat16, **SIZES, **changes)
    floats = load_file(whole / FILE)
    packed: dict[str, Tensor] = {}
    for seed, name in enumerate(sorted(floats)):
        if not name.endswith((".gate_up_proj", ".down_proj")):
            packed[name] = floats[name]
            continue
        num_experts, inputs, outputs = floats[name].shape
        experts = Experts.drawn(num_experts, inputs, outputs, seed)
        floats[name] = experts.floats().bfloat16().contiguous()
        packed |= {f"{name}_blocks": experts.blocks, f"{name}_scales": experts.scales}
    save_file(floats, whole / FILE, metadata={"format": "pt"})
    other = folder / "packed"
    other.mkdir()
    for file in whole.glob("*.json"):
        (other / file.name).write_bytes(file.read_bytes())
    edit_config(other, quantization_config=QUANTIZATION)
    places = {
        name: f"model-{place % 2:05}-of-00001.safetensors" for place, name in enumerate(packed)
    }
    for shard in set(places.values()):
        tensors = {name: packed[name] for name, its in places.items() if its == shard}
        save_file(tensors, other / shard, metadata={"format": "pt"})
    (other / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return whole, other
