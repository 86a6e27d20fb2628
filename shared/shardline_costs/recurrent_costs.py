"""What a recurrent layer weighs, read from a config as JSON has it: its products, and the state
that it keeps for a sequence. Knows no device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STATE_BYTES = 4
"""Of a number that goes from token to token: float32 whatever the dtype of weights."""
RECURRENT = frozenset({"conv", "linear_attention", "mamba", "hybrid"})
"""Types of layers that keep a state; a hybrid one attends too."""
ALONE = frozenset({"mlp", "moe"})
"""Types of layers that neither attend nor keep a state."""

Shape = tuple[int, int]


@dataclass(frozen=True, slots=True)
class RecurrentSizes:
    """Holds the sizes of one layer's recurrent part."""

    products: tuple[Shape, ...]
    """(inputs, outputs)."""
    state_bytes: int
    """For one sequence."""
    num_convolved: int
    """Weights of the convolution."""


def layer_types(scope: Mapping[str, Any]) -> list[str] | None:
    """Returns the type of each layer, if the config names them in one of its ways."""
    num_layers = scope.get("num_hidden_layers")
    if scope.get("model_type") == "falcon_h1" and isinstance(num_layers, int):
        return ["hybrid"] * num_layers
    if scope.get("model_type") == "bamba" and isinstance(num_layers, int):
        attending = scope.get("attn_layer_indices") or ()
        kinds = ("linear_attention", "full_attention")
        return [kinds[number in attending] for number in range(num_layers)]
    named = scope.get("layer_types") or scope.get("layers_block_type")
    return None if named is None else [str(each) for each in named]


def recurrent_sizes(scope: Mapping[str, Any], kind: str, hidden: int) -> RecurrentSizes | None:
    """Returns the sizes of a layer of this type; None for one that is not recurrent, or of which
    the config names no sizes."""
    if kind not in RECURRENT:
        return None
    if kind == "conv":
        window = scope.get("conv_L_cache") or 3
        products = ((hidden, 3 * hidden), (hidden, hidden))
        return RecurrentSizes(products, STATE_BYTES * (window - 1) * hidden, window * hidden)
    return _delta_rule(scope, hidden) or _state_space(scope, hidden)


def _delta_rule(scope: Mapping[str, Any], hidden: int) -> RecurrentSizes | None:
    names = [f"linear_{name}" for name in ("num_key_heads", "num_value_heads")]
    names += [f"linear_{name}_head_dim" for name in ("key", "value")]
    sizes = [scope.get(name) for name in names]
    if not all(isinstance(size, int) for size in sizes):
        return None
    key_heads, heads, key_dim, value_dim = (int(size or 0) for size in sizes)
    channels = 2 * key_heads * key_dim + heads * value_dim
    window = (scope.get("linear_conv_kernel_dim") or 4) - 1
    into = (hidden, channels + heads * value_dim + 2 * heads)
    state = heads * key_dim * value_dim + window * channels
    products = (into, (heads * value_dim, hidden))
    return RecurrentSizes(products, STATE_BYTES * state, (window + 1) * channels)


def _state_space(scope: Mapping[str, Any], hidden: int) -> RecurrentSizes | None:
    heads = scope.get("mamba_n_heads") or scope.get("mamba_num_heads")
    states = scope.get("mamba_d_state") or scope.get("ssm_state_size")
    groups = scope.get("mamba_n_groups") or scope.get("n_groups") or 1
    if not isinstance(heads, int) or not isinstance(states, int):
        return None
    dim = scope.get("mamba_head_dim") or scope.get("mamba_d_head")
    wide = scope.get("mamba_d_ssm") or int(scope.get("mamba_expand", 2) * hidden)
    inner = heads * dim if isinstance(dim, int) else wide
    channels = inner + 2 * groups * states
    window = (scope.get("mamba_d_conv") or scope.get("conv_kernel") or 4) - 1
    into = (hidden, inner + channels + heads)
    state = inner * states + window * channels
    return RecurrentSizes((into, (inner, hidden)), STATE_BYTES * state, (window + 1) * channels)
