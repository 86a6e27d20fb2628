"""Finds what each layer of a shard keeps per token, by one run on two rows. Refuses layers that
cannot be split off.

The run is small and real, so it sees all that a model does to its keys and values. Knows no KV
block.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from services.stage.attention.paged_kv import KvShape
from services.stage.model.model_info import ROW_BY_ROW
from services.stage.model.refusal import refuse
from services.stage.model.shard import Shard

PROBE = "shardline_probe"
NUM_ROWS = 2
LAYER_INPUTS = frozenset(
    {
        "hidden_states",
        "attention_mask",
        "position_ids",
        "position_embeddings",
        "cache_position",
        "past_key_values",
    }
)


def probe_kv_shapes(shard: Shard) -> dict[int, KvShape]:
    """Returns the KV shape of every layer that attends. Raises Invalid for layers that take or
    return more than hidden states, and for one that neither attends nor is recurrent, unless it is
    by its type an MLP."""
    seen: dict[int, KvShape] = {}
    layers = shard.layer_modules.values()
    joined = shard.info.joined.layers if shard.info.joined else range(0)
    hooks = [
        layer.register_forward_pre_hook(_check_inputs, with_kwargs=True)
        for number, layer in shard.layer_modules.items()
        if number not in joined
    ]
    check_output = partial(_check_output, shard.model.pieces.num_outputs)
    hooks += [layer.register_forward_hook(check_output) for layer in layers]
    attention = [
        module for layer in layers for module in layer.modules() if hasattr(module, "layer_idx")
    ]
    usual = shard.model.config._attn_implementation  # noqa: SLF001 (no public reader)
    shard.model.set_attn_implementation(PROBE)
    try:
        shard.hidden(shard.zeros(NUM_ROWS), torch.arange(NUM_ROWS, device=shard.device))
    finally:
        shard.model.set_attn_implementation(usual)
        for hook in hooks:
            hook.remove()
    for module in attention:
        shape = module.__dict__.pop(PROBE, None)
        if shape is not None:
            seen[module.__dict__["layer_idx"]] = shape
    kinds = getattr(shard.info.text_config, "layers_block_type", None) or ()
    alone = {number for number, kind in enumerate(kinds) if kind in ROW_BY_ROW}
    missing = sorted(set(shard.layers) - set(seen) - set(shard.recurrence.shapes) - alone)
    if missing:
        refuse(
            f"{shard.info.config.model_type!r} has layers {missing} that neither attend through "
            "transformers' attention interface nor keep a state of a known kind"
        )
    return seen


def _record(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """An attention function that stores the KV shape on its module and returns zeros [1, T, H,
    Dv]."""
    module.__dict__[PROBE] = KvShape(
        num_kv_heads=key.shape[1], head_dim=key.shape[3], value_head_dim=value.shape[3]
    )
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register(PROBE, _record)


def _check_inputs(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    others = [
        name
        for name, value in kwargs.items()
        if name not in LAYER_INPUTS and _carries_tensor(value)
    ]
    if any(_carries_tensor(value) for value in args[1:]):
        others.append("a second positional input")
    if others:
        refuse(
            f"{type(layer).__name__} takes {', '.join(others)} besides hidden states, "
            "which a split would cut"
        )


def _check_output(
    num_outputs: int | None, layer: nn.Module, _args: tuple[Any, ...], output: Any
) -> None:
    """Takes a tuple of hidden states and nothing else, where stubs return one too."""
    if (
        isinstance(output, tuple)
        and num_outputs is not None
        and output[1:] == (None,) * (num_outputs - 1)
    ):
        output = output[0]
    if not isinstance(output, Tensor):
        refuse(f"{type(layer).__name__} returns a {type(output).__name__}, not hidden states alone")


def _carries_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        value = tuple(value.values())
    return isinstance(value, Tensor) or (
        isinstance(value, list | tuple) and any(_carries_tensor(v) for v in value)
    )
