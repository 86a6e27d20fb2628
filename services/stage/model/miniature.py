"""A model's miniature: transformers' own class with the model's structure, small sizes and random
weights.

What a model's code does can be tried on it, whole on any stage, without a weight of the model.
Knows no shard and no KV.
"""

from __future__ import annotations

import copy
import math
import re
from typing import Any, NamedTuple

import torch

from services.stage.model.encoders.encoder_class import is_encoder
from services.stage.model.refusal import refuse
from services.stage.model.text_part import is_container, text_class, text_config
from services.stage.products.module_failures import FAILURES, first_line

MIN_LAYERS = 4
"""More are kept if a kind of layer comes later."""
HEAD_DIM = 16
VOCAB = 96
KV_HEADS = "num_key_value_heads"
SHARED = "num_kv_shared_layers"
"""How many of the last layers take the keys and values of others."""
SHORT = 8
"""Tokens that the two sequences of a trial pass."""
WIDTH = "mamba_d_ssm"
"""The width of state-space layers, where it is not `mamba_expand` times the hidden size."""
NUMBERED = ("attn_layer_indices",)
"""Lists of the layers of one kind by their numbers."""
SECTIONS = "mrope_section"
"""Of a rope, how many frequencies go by time, by height and by width: equal for a text."""
ROPE_LENGTH = "original_max_position_embeddings"


class StateSpaceNames(NamedTuple):
    """How a config names the sizes of its state-space layers."""

    expand: str
    heads: str
    dim: str
    groups: str


STATE_SPACES = (
    StateSpaceNames("mamba_expand", "mamba_n_heads", "mamba_d_head", "mamba_n_groups"),
    StateSpaceNames("expand", "num_heads", "head_dim", "n_groups"),
)
LIMITS = (
    (re.compile(r"^vocab_size"), VOCAB),
    (re.compile(r"(intermediate|ffn|ffn_hidden)_size(_mlp)?$|ffn_dim$"), 48),
    (re.compile(r"^(moe_)?n(um)?_(local_|routed_)?experts$"), 32),
    (re.compile(r"window$|^attention_chunk_size$"), SHORT),
    (re.compile(r"^floor_scale$"), SHORT // 2),
    (re.compile(r"^rotary_dim$"), HEAD_DIM // 2),
)
"""Sizes by their names in a config, at most. Few tokens are enough to see such a window; the
largest groups and choices of experts decide the number of experts."""
GAIN = 1.5
"""Weights are drawn so wide that every part matters to the outputs."""


def miniature_config(config: Any) -> Any:
    """Returns a copy of a causal LM's config with small widths and few layers; of a multimodal one
    the language model's alone are smaller.

    What decides which code runs stays as it is: kinds of layers, query heads for each KV head,
    experts.
    """
    whole = copy.deepcopy(config)
    _shrink(text_config(whole), text_config(config))
    whole.dtype = torch.float32
    # Containers put it where inputs other than text were, encoders may count positions from it.
    has_padding = is_container(config) or is_encoder(config)
    text_config(whole).pad_token_id = 0 if has_padding else None
    return whole


def _shrink(miniature: Any, config: Any) -> None:
    heads = config.num_attention_heads
    kv_heads = _value(config, KV_HEADS) or heads
    fewer = kv_heads // 2 if kv_heads % 2 == 0 else kv_heads
    hidden = heads // fewer * HEAD_DIM
    num_layers = _num_layers(config)
    for name, value in list(vars(config).items()):
        setattr(miniature, name, _smaller(name, value, config, hidden, num_layers))
    sizes = {"num_hidden_layers": num_layers, "num_attention_heads": heads // fewer}
    if num_shared := getattr(config, SHARED, None) or 0:
        sizes[SHARED] = min(num_shared, num_layers // 2)
    if _value(config, KV_HEADS):
        sizes[KV_HEADS] = kv_heads // fewer
    for name, size in (sizes | _state_space_sizes(config, hidden)).items():
        setattr(miniature, name, size)
    if by_layer := config.to_dict().get("per_layer_config"):
        miniature.per_layer_config = {
            number: changes | _fewer_heads(changes, fewer)
            for number, changes in by_layer.items()
            if int(number) < num_layers
        }
    miniature.dtype = torch.float32


def build_miniature(config: Any) -> Any:
    """Returns the whole model of a config from `miniature_config`, with transformers' plainest
    attention and experts.

    Its weights are the same every time, float32 on the CPU. Raises Invalid if transformers cannot
    make it.
    """
    kind = text_class(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        try:
            model = kind(copy.deepcopy(config)).eval()
        except FAILURES as error:
            refuse(
                f"{kind.__name__} cannot be tried in a small size: {first_line(error)}", cause=error
            )
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=GAIN / math.sqrt(parameter.shape[-1]))
            else:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    return model


def _state_space_sizes(config: Any, hidden: int) -> dict[str, int]:
    """Returns the number of heads of state-space layers for a hidden size: enough in each group to
    make a difference."""
    names = next((names for names in STATE_SPACES if hasattr(config, names.expand)), None)
    if names is None or not isinstance(getattr(config, names.heads, None), int):
        return {}
    inner = int(getattr(config, names.expand) * hidden)
    num_groups = min(getattr(config, names.groups), 2)
    num_heads = 2 * num_groups
    sizes = {names.groups: num_groups, names.heads: num_heads, names.dim: inner // num_heads}
    return sizes | ({WIDTH: inner} if getattr(config, WIDTH, None) else {})


def _value(config: Any, name: str) -> Any:
    """Returns a field of a config, the one of most layers if they differ in it; None without it."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers' answer where layers differ in it
        return vars(config).get(name)


def _fewer_heads(changes: dict[str, Any], fewer: int) -> dict[str, int]:
    """Returns the KV heads of a layer that has others than most, made fewer as theirs are."""
    return {KV_HEADS: max(1, changes[KV_HEADS] // fewer)} if KV_HEADS in changes else {}


def _num_layers(config: Any) -> int:
    """Returns how many first layers show every kind that a list of layers names."""
    total: int = config.num_hidden_layers
    num_shared = getattr(config, SHARED, None) or 0
    lists = [
        value
        for value in vars(config).values()
        if _is_by_layer(value, total) and isinstance(value[0], str)
    ]
    numbered = [min(numbers) for name in NUMBERED if (numbers := getattr(config, name, None))]
    firsts = [*numbered, *(max(kinds.index(kind) for kind in kinds) for kinds in lists)]
    shown = max(MIN_LAYERS, *(1 + first for first in firsts), 0)
    return min(total, shown + min(shown, num_shared))


def _smaller(name: str, value: Any, config: Any, hidden: int, num_layers: int) -> Any:
    if _is_by_layer(value, config.num_hidden_layers):
        return value[:num_layers]
    if isinstance(value, dict) and "rope" in name:
        return _smaller_rope(value, _head_dims(config, hidden))
    is_size = type(value) is int and "position" not in name
    return _smaller_size(name, value, config, hidden) if is_size else value


def _smaller_size(name: str, size: int, config: Any, hidden: int) -> int:
    for pattern, limit in LIMITS:
        if pattern.search(name):
            return min(size, limit)
    if size == config.hidden_size:
        return hidden
    is_share = name.endswith("head_dim") and size * config.num_attention_heads == config.hidden_size
    return HEAD_DIM if is_share else size


def _is_by_layer(value: Any, num_layers: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == num_layers


def _head_dims(config: Any, hidden: int) -> tuple[int, int]:
    """The size of a head, and that of the miniature's."""
    has_own = _value(config, "head_dim") is not None
    own = _value(config, "head_dim") or config.hidden_size // config.num_attention_heads
    return own, _smaller_size("head_dim", own, config, hidden) if has_own else HEAD_DIM


def _smaller_rope(rope: dict[str, Any], head_dims: tuple[int, int]) -> dict[str, Any]:
    """A rope without factors for each dimension of a head, of which the miniature has fewer, and of
    a length that few tokens pass: some models scale by it themselves. A rope that rescales at that
    length keeps it."""
    if isinstance(sections := rope.get(SECTIONS), list):
        rope = rope | {SECTIONS: tuple(_smaller_sections(sections, *head_dims))}
    if any(isinstance(value, list) for value in rope.values()):
        kept = {
            name: value
            for name, value in rope.items()
            if name in {"rope_theta", "partial_rotary_factor", SECTIONS}
        }
        return kept | {"rope_type": "default"}
    small = {
        name: _smaller_rope(value, head_dims) if isinstance(value, dict) else value
        for name, value in rope.items()
    }
    length = rope.get(ROPE_LENGTH)
    if isinstance(length, int | float) and rope.get("rope_type") != "dynamic":
        small[ROPE_LENGTH] = min(length, SHORT)
    return small


def _smaller_sections(sections: list[int], head_dim: int, smaller: int) -> list[int]:
    """Sections of as many frequencies as a smaller head has."""
    total = sum(sections) * smaller // head_dim
    others = [size * smaller // head_dim for size in sections[1:]]
    return [total - sum(others), *others]
