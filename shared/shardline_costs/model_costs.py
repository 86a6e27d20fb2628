"""What a model's parts weigh, read from its config alone: layers by kind, embedding, output
layer, KV of a token.

Knows no device and no time. Sizes are of the usual decoder: attention with grouped heads, a gated
MLP or experts. Biases and norms are left out: they are less than a thousandth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from shardline.base.errors import Invalid
from shardline.base.rounding import round_up
from shardline.contract.fleet.joined_layers import joined_layers
from shardline_costs.recurrent_costs import ALONE, layer_types, recurrent_sizes
from shardline_gguf import has_mxfp4_experts, read_config, share_above_4_bits

WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "int4": 20 / 32}
"""By SHARDLINE_DTYPE; of int4, 32 weights share a scale and a minimum of 2 bytes each."""
GROUPED_INT8_BYTES = 34 / 32
"""Of int4, where a file has more than 4 bits."""
EMBEDDING_BYTES = {**WEIGHT_BYTES, "int4": GROUPED_INT8_BYTES}
"""Of a weight of the embedding or the output layer."""
KV_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 2, "int4": 2}
"""Of one number: with weights of int8 or int4, activations and KV are bfloat16."""
UNGATED = {
    *(
        "biogpt",
        "bloom",
        "codegen",
        "ctrl",
        "falcon",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "gptj",
        "mpt",
        "nanochat",
    ),
    *("nemotron", "nemotron_h", "opt", "persimmon", "phi", "starcoder2"),
}
"""Model types with one product up in the MLP; all others have a gate next to it."""
GATED_ATTENTION = {
    f"{name}{suffix}"
    for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe")
    for suffix in ("", "_text")
}
"""Model types with a gate as wide as the queries."""
ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
LLAMA4_STEP = "interleave_moe_layer_step"
"""From one layer of experts to the next: with it, each has a shared expert, too."""
FIELD = "--model"
Shape = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """All layers of one kind cost the same."""

    name: str
    """Such as `full_attention` or `sliding_attention+experts`."""
    products: tuple[Shape, ...]
    """(inputs, outputs) of each product that one row takes part in: of experts only the active
    ones."""
    num_weights: int
    """Those of all experts included."""
    kv_numbers: int
    """Numbers that a token's keys and values take."""
    state_bytes: int = 0
    """What a sequence keeps in addition, at any length."""


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """A model's layers in order, and what stands before and behind them."""

    layers: tuple[LayerKind, ...]
    hidden_size: int
    vocab_size: int
    tied: bool
    joined_from: int | None = None
    """The layer from which on all must be in one stage."""
    int4_bytes: float = WEIGHT_BYTES["int4"]
    """Of a weight of layers in int4, on average: a file's own numbers may have more bits."""
    int8_bytes: float = WEIGHT_BYTES["int8"]
    """Of a weight of layers in int8: a file's own numbers keep their scales."""

    @classmethod
    def read(cls, model: Path) -> ModelCosts:
        """Reads the config of a model's folder or GGUF file. Raises Invalid if it is none of a
        causal language model."""
        try:
            config = read_config(model)
            in_8_bits = share_above_4_bits(model, config) or float(_is_packed_in_8_bits(config))
            least = WEIGHT_BYTES["int4"]
            int4_bytes = least + in_8_bits * (GROUPED_INT8_BYTES - least)
            costs = replace(cls.of(config), int4_bytes=int4_bytes)
            is_packed = _quantization(config).get("quant_method") == "mxfp4"
            if not (is_packed or has_mxfp4_experts(model, config)):
                return costs
            # But for attention, less than 3 % of the weights
            return replace(costs, int8_bytes=GROUPED_INT8_BYTES)
        except (OSError, ValueError) as error:
            raise Invalid(
                FIELD,
                f"{model / 'config.json'} cannot be read: {error}",
                "Give the folder of a transformers model, or a GGUF file",
            ) from error

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelCosts:
        """Takes a config as JSON has it. Raises Invalid if a size is missing."""
        scope = {**config, **(config.get("text_config") or {})}
        named = layer_types(scope)
        scope = {"num_hidden_layers": len(named or ()) or None, **scope}
        num_layers = _size(scope, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
        attentions = named or ["full_attention"] * num_layers
        if len(attentions) < num_layers:
            raise Invalid(
                FIELD,
                f"layer_types names {len(attentions)} of {num_layers} layers",
                "Correct config.json",
            )
        kinds = tuple(
            _layer(scope, str(attentions[number]), number) for number in range(num_layers)
        )
        joined = joined_layers(config)
        return cls(
            layers=kinds,
            hidden_size=_size(scope, "hidden_size", "n_embd"),
            vocab_size=_size(scope, "vocab_size"),
            tied=bool(scope.get("tie_word_embeddings", True)),
            joined_from=None if joined is None else joined.layers.start,
        )

    def weight_bytes(self, dtype: str) -> float:
        """Returns what a weight of the layers takes on average, by SHARDLINE_DTYPE."""
        own = {"int4": self.int4_bytes, "int8": self.int8_bytes}
        return own.get(dtype, WEIGHT_BYTES[dtype])

    @property
    def embedding_weights(self) -> int:
        """Weights of the embedding; the output layer has as many."""
        return self.vocab_size * self.hidden_size

    @property
    def num_weights(self) -> int:
        """Counts those of the whole model; a tied output layer is counted once."""
        return sum(kind.num_weights for kind in self.layers) + self.embedding_weights * (
            1 if self.tied else 2
        )

    @property
    def shapes_id(self) -> str:
        """Equal for models that cost the same, whatever their weights, and wherever they may be
        split."""
        costs = msgspec.to_builtins(self)
        costs.pop("joined_from")
        for name in ("int4", "int8"):
            if costs[f"{name}_bytes"] == WEIGHT_BYTES[name]:
                costs.pop(f"{name}_bytes")
        for kind in costs["layers"]:
            if not kind["state_bytes"]:  # as it was before layers could have some
                kind.pop("state_bytes")
        return sha256(msgspec.json.encode(costs)).hexdigest()[:16]

    @cached_property
    def kinds(self) -> dict[str, LayerKind]:
        """The different kinds of layers by name, in order of their first layer."""
        return {kind.name: kind for kind in self.layers}


def _layer(scope: Mapping[str, Any], attention: str, number: int) -> LayerKind:
    scope = _of_layer(scope, attention, number)
    hidden = _size(scope, "hidden_size", "n_embd")
    heads = _size(scope, "num_attention_heads", "n_head")
    kv_heads = scope.get("num_key_value_heads") or (1 if scope.get("multi_query") else heads)
    head_dim = scope.get("head_dim") or hidden // heads
    recurrent = recurrent_sizes(scope, attention, hidden)
    attends = attention not in ALONE and (recurrent is None or attention == "hybrid")
    num_queries = 2 * heads if scope.get("model_type") in GATED_ATTENTION else heads
    qkvo: tuple[Shape, ...] = (
        ((hidden, (num_queries + 2 * kv_heads) * head_dim), (heads * head_dim, hidden))
        if attends
        else ()
    )
    if recurrent is not None:
        qkvo = (*qkvo, *recurrent.products)
    experts = 0 if attention == "mlp" else _num_experts(scope, number)
    inner = _inner_size(scope, hidden)
    if scope.get("model_type") == "nemotron_h" and attention not in ALONE:
        mlp: tuple[Shape, ...] = ()
        num_mlp = 0
        name = attention
    elif experts == 0:
        num_up = 1 if scope.get("model_type") in UNGATED else 2
        inner = scope.get("intermediate_size_mlp") or inner  # Llama 4's, next to experts
        mlp = ((hidden, num_up * inner), (inner, hidden))
        num_mlp = _volume(mlp)
        name = attention
    else:
        width = scope.get("moe_intermediate_size") or inner
        expert = ((hidden, 2 * width), (width, hidden))
        shared = scope.get("shared_expert_intermediate_size") or width * (
            scope.get("n_shared_experts") or int(LLAMA4_STEP in scope)
        )
        always = ((hidden, experts), *(((hidden, 2 * shared), (shared, hidden)) if shared else ()))
        active = _size(
            scope, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts"
        )
        mlp = (*always, *(expert * active))
        num_mlp = _volume(always) + experts * _volume(expert)
        name = f"{attention}+experts"
    own = scope.get("hidden_size_per_layer_input") or 0
    own_products: tuple[Shape, ...] = ((hidden, own), (own, hidden)) if own else ()
    own_rows = scope.get("vocab_size_per_layer_input") or 0
    return LayerKind(
        name=name,
        products=(*qkvo, *mlp, *own_products),
        num_weights=_volume((*qkvo, *own_products))
        + num_mlp
        + own_rows * own
        + (0 if recurrent is None else recurrent.num_convolved),
        kv_numbers=2 * kv_heads * head_dim if attends else 0,
        state_bytes=0 if recurrent is None else recurrent.state_bytes,
    )


def _inner_size(scope: Mapping[str, Any], hidden: int) -> int:
    """The width of a dense MLP."""
    names = ("intermediate_size", "ffn_dim", "n_inner")
    inner = next((int(scope[name]) for name in names if scope.get(name)), 4 * hidden)
    if not scope.get("block_auto_adjust_ff_dim"):
        return inner
    inner = int(int(2 * inner / 3) * (scope.get("block_ffn_dim_multiplier") or 1))
    return round_up(inner, scope.get("block_multiple_of") or 1)


def _of_layer(scope: Mapping[str, Any], attention: str, number: int) -> Mapping[str, Any]:
    """The sizes of one layer, where layers differ in them as Gemma 4's do."""
    own = (scope.get("per_layer_config") or {}).get(str(number))
    if own or attention != "full_attention" or not scope.get("global_head_dim"):
        return {**scope, **(own or {})}
    kv_heads = scope.get("num_global_key_value_heads") if scope.get("attention_k_eq_v") else None
    own = {"head_dim": scope["global_head_dim"]}
    return {**scope, **own, **({"num_key_value_heads": kv_heads} if kv_heads else {})}


def _num_experts(scope: Mapping[str, Any], number: int) -> int:
    """Experts of this layer; 0 for a dense one."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    num = next((int(scope[name]) for name in names if scope.get(name)), 0)
    is_dense = (
        number < (scope.get("first_k_dense_replace") or 0)
        or number in (scope.get("mlp_only_layers") or ())
        or (number + 1) % (scope.get("decoder_sparse_step") or 1) != 0
        or (number + 1) % (scope.get(LLAMA4_STEP) or 1) != 0
    )
    return 0 if is_dense else num


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the quantization of a config, or of a container's text."""
    scopes = (config, config.get("text_config") or {})
    names = ("quantization_config", "compression_config")
    found = (each.get(name) for each in scopes for name in names)
    return next(filter(None, found), {})


def _is_packed_in_8_bits(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's own integers have 8 bits, which int4 keeps, in some layers."""
    settings = _quantization(config)
    groups = (settings.get("config_groups") or {}).values()
    weights = [group.get("weights") or {} for group in groups]
    bits = {
        "gptq": [settings.get("bits")],
        "compressed-tensors": [each.get("num_bits") for each in weights],
    }
    is_packed = settings.get("format", "pack-quantized") == "pack-quantized"
    return is_packed and 8 in bits.get(str(settings.get("quant_method")), [])


def _volume(shapes: tuple[Shape, ...]) -> int:
    return sum(inputs * outputs for inputs, outputs in shapes)


def _size(scope: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(scope.get(name), int):
            return int(scope[name])
    raise Invalid(FIELD, f"config.json has no {' or '.join(names)}", "Give a causal language model")
