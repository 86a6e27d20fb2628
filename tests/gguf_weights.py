"""The weights of a model as the converter of llama.cpp stores them: by names that its tables map,
or by those of the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

VALUES: Final = "llama", "granite", "granitehybrid", "smollm3", "mistral3"
"""Architectures whose rotated dimensions the converter puts into pairs."""
SHIFTED: Final = "gemma", "gemma2", "gemma3", "nemotron"
"""Architectures whose norms the converter stores with the 1 that the model adds."""

Named = Iterator[tuple[str, Tensor]]


def converted_weights(model: Any, architecture: str) -> dict[str, Tensor]:
    """Returns each weight once: the output layer of tied ones is the embedding."""
    config = model.config
    weights = {name: weight.detach() for name, weight in model.state_dict().items()}
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    for name in ("altup_projections", "altup_unembed_projections"):
        stacked = [weights.pop(f"model.{name}.{number}.weight", None) for number in range(3)]
        if stacked[0] is not None:
            weights[f"model.{name}.weight"] = torch.stack(stacked)
    convert = CONVERTERS.get(architecture, _usual)
    return {
        new_name: stored
        for name, weight in weights.items()
        for new_name, stored in convert(
            name, _converted(weight, name, config, architecture), config
        )
    }


def _usual(name: str, weight: Tensor, _: Any = None) -> Named:
    base = name.removesuffix("gate_up_proj")
    if name.endswith("experts.gate_up_proj"):
        gate, up = weight.chunk(2, dim=1)
        yield f"{base}gate_proj.weight", gate
        yield f"{base}up_proj.weight", up
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", weight
    else:
        yield name, weight


def _gpt_oss(name: str, weight: Tensor, _: Any) -> Named:
    end = "bias" if name.endswith("_bias") else "weight"
    name = name.removesuffix("_bias")
    if name.endswith("gate_up_proj"):
        outputs = weight if end == "bias" else weight.mT
        base = name.removesuffix("gate_up_proj")
        yield f"{base}gate_proj.{end}", outputs[:, ::2]
        yield f"{base}up_proj.{end}", outputs[:, 1::2]
    elif name.endswith("experts.down_proj"):
        yield f"{name}.{end}", weight if end == "bias" else weight.mT
    elif name.endswith("sinks"):
        yield f"{name}.weight", weight
    else:
        yield name, weight


def _qwen3_next(name: str, weight: Tensor, config: Any) -> Named:
    if name.endswith("in_proj_qkvz.weight"):
        heads, shares = config.linear_num_key_heads, config.linear_num_value_heads
        keys = config.linear_key_head_dim
        values = shares // heads * config.linear_value_head_dim
        parts = weight.view(heads, -1, weight.shape[1]).split([keys, keys, values, values], 1)
        *qkv, gates = [part.reshape(-1, weight.shape[1]) for part in parts]
        layer = name.split(".")[2]
        yield f"blk.{layer}.attn_qkv.weight", torch.cat(qkv)
        yield f"blk.{layer}.attn_gate.weight", gates
    else:
        yield from _delta_rule(name, weight)


def _qwen35(name: str, weight: Tensor, config: Any) -> Named:
    num, keys = config.linear_num_value_heads, config.linear_num_key_heads
    start = 2 * keys * config.linear_key_head_dim

    def tiled(part: Tensor) -> Tensor:
        order = torch.arange(num).view(keys, -1).T.flatten()
        return part.view(num, -1, *part.shape[1:])[order].reshape(part.shape)

    if "linear_attn" not in name or name.endswith("norm.weight"):
        pass
    elif "out_proj" in name:
        weight = tiled(weight.T.contiguous()).T
    elif "in_proj_qkv" in name or "conv1d" in name:
        weight = torch.cat((weight[:start], tiled(weight[start:].contiguous())))
    else:
        weight = tiled(weight)
    yield from _delta_rule(name, weight)


def _gemma3n(name: str, weight: Tensor, _: Any) -> Named:
    yield f"{name}.weight" if name.endswith("_scale") else name, weight


def _gemma4(name: str, weight: Tensor, _: Any) -> Named:
    layer = name.split(".")[2] if ".layers." in name else None
    if name.endswith("router.scale"):
        yield f"blk.{layer}.ffn_gate_inp.scale", weight
    elif name.endswith("per_expert_scale"):
        yield f"blk.{layer}.ffn_down_exps.scale", weight
    elif ".experts." in name or name.endswith("layer_scalar"):
        yield f"{name}.weight", weight
    else:
        yield name, weight


def _granite_hybrid(name: str, weight: Tensor, config: Any) -> Named:
    layer = name.split(".")[2] if ".layers." in name else None
    end = "_shexp" if config.num_local_experts else ""
    halves = [weight] if weight.dim() == 1 else weight.chunk(2, -2)
    if name.endswith("input_linear.weight"):
        yield f"blk.{layer}.ffn_gate{end}.weight", halves[0]
        yield f"blk.{layer}.ffn_up{end}.weight", halves[1]
    elif name.endswith("output_linear.weight"):
        yield f"blk.{layer}.ffn_down{end}.weight", weight
    elif name.endswith("experts.gate_up_proj"):
        yield f"blk.{layer}.ffn_gate_exps.weight", halves[0]
        yield f"blk.{layer}.ffn_up_exps.weight", halves[1]
    elif name.endswith("experts.down_proj"):
        yield f"blk.{layer}.ffn_down_exps.weight", weight
    elif name.endswith("block_sparse_moe.router.weight"):
        yield f"blk.{layer}.ffn_gate_inp.weight", weight
    else:
        yield from _mamba2(name, weight, config.mamba_n_groups)


def _nemotron_h(name: str, weight: Tensor, config: Any) -> Named:
    if ".q_proj." in name:
        weight = _in_pairs(weight, config.num_attention_heads)
    elif ".k_proj." in name:
        weight = _in_pairs(weight, config.num_key_value_heads)
    layer = name.split(".")[2] if ".layers." in name else None
    if name.endswith("e_score_correction_bias"):
        yield f"blk.{layer}.exp_probs_b.bias", weight
    elif ".experts." in name:
        yield (
            f"blk.{layer}.ffn_{name.rsplit('.', maxsplit=1)[-1].removesuffix('_proj')}_exps.weight",
            weight,
        )
    else:
        yield from _mamba2(name.replace("model.", "backbone."), weight, config.n_groups)


def _mamba2(name: str, weight: Tensor, num_groups: int) -> Named:
    if name.endswith((".D", "A_log")):
        yield name, (-weight.exp() if name.endswith("A_log") else weight)[:, None]
    elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        yield name, weight.view(num_groups, -1)
    elif name.endswith("conv1d.weight"):
        yield name, weight.squeeze()
    else:
        yield name.replace("dt_bias", "dt_proj.bias"), weight


def _falcon_h1(name: str, weight: Tensor, config: Any) -> Named:
    """Factors of activations become part of weights."""
    width, groups = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    counts = torch.tensor([width, width, groups, groups, config.mamba_n_heads])
    of_inputs = torch.tensor(config.ssm_multipliers).repeat_interleave(counts)[:, None]
    factors = {
        "down_proj": config.mlp_multipliers[1],
        "gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * config.attention_in_multiplier,
        "q_proj": config.attention_in_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "in_proj": config.ssm_in_multiplier * of_inputs,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    module = name.split(".")[-2]
    yield from _mamba2(name, weight * factors.get(module, 1.0), config.mamba_n_groups)


def _ernie(name: str, weight: Tensor, _: Any) -> Named:
    if name.endswith("e_score_correction_bias"):
        yield f"blk.{name.split('.')[2]}.exp_probs_b.bias", weight
    else:
        yield from _usual(name, weight)


def _delta_rule(name: str, weight: Tensor) -> Named:
    if name.endswith("A_log"):
        yield name, -weight.exp()
    elif name.endswith("dt_bias"):
        yield name.replace("dt_bias", "dt_proj.bias"), weight
    elif "conv1d" in name:
        yield name, weight.squeeze()
    elif name.endswith("norm.weight") and "linear_attn" not in name:
        yield name, weight + 1
    else:
        yield from _usual(name, weight)


CONVERTERS: Final[Mapping[str, Callable[[str, Tensor, Any], Named]]] = {
    "gpt-oss": _gpt_oss,
    "gemma4": _gemma4,
    "gemma3n": _gemma3n,
    "granitehybrid": _granite_hybrid,
    "ernie4_5-moe": _ernie,
    "glm4moe": _ernie,
    "falcon-h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "qwen3next": _qwen3_next,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35,
}


def _converted(weight: Tensor, name: str, config: Any, architecture: str) -> Tensor:
    if architecture in VALUES and ".q_proj." in name:
        return _in_pairs(weight, config.num_attention_heads)
    if architecture in VALUES and ".k_proj." in name:
        return _in_pairs(weight, config.num_key_value_heads)
    if name.endswith("conv.conv.weight"):
        return weight.squeeze(1)
    is_shifted = architecture in SHIFTED and name.endswith("norm.weight")
    return weight + 1 if is_shifted else weight


def _in_pairs(weight: Tensor, num_heads: int) -> Tensor:
    halves = weight.view(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)
