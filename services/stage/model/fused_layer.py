"""Layers as one call of the kernel, or all of a layer behind what mixes its tokens, where that
gives every bit of the layer's own forward in a trial.

A layer is recognized by its parts (`layer_parts`). A trial then decides: it sees what parts do not
show. Knows no model by name.

Letters of shapes: T packed rows, H the hidden size, D the size of an attention head, R its
dimensions that positions turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from ctypes import byref, pointer
from typing import Any

import torch
from torch import Tensor, nn

from services.stage.attention.attention import Attention, KvWritten
from services.stage.kernels.kernel import DTYPES, AttentionCall, Kernel, LayerCall, Turned
from services.stage.model.fused_encoder_layer import FusedEncoderLayer, fused_encoder_layer
from services.stage.model.layer_parts import LayerParts, attention_parts, layer_parts, of_rank
from services.stage.model.split_layers import GatheredLinear
from services.stage.products.module_failures import FAILURES
from services.stage.ranks.group import RankGroup


class FusedLayer:
    """A recognized layer's forward."""

    def __init__(self, kernel: Kernel, attention: Attention, call: LayerCall) -> None:
        """Takes the call of a layer, which owns the memory that it points to."""
        self._kernel = kernel
        self._attention = attention
        self._call = call

    def takes(self, x: object, options: Mapping[str, Any]) -> bool:
        """Whether these are hidden states and tables of cos and sin as `forward` needs them."""
        turned = self._call.turned
        tables = _tables(options) or ()
        return (
            isinstance(x, Tensor)
            and _is_packed(x)
            and (not turned.dim or len(tables) == 2)
            and all(table.shape[:2] == x.shape[:2] for table in tables)
            and (
                not turned.dim or all(_kind(each) == (turned.dim, turned.dtype) for each in tables)
            )
        )

    def forward(
        self,
        hidden_states: Tensor,
        *_: Any,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **__: Any,
    ) -> Tensor:
        """Returns the layer's output [1, T, H] for hidden states [1, T, H] in one dtype and cos and
        sin [1, T, R] in that or float32.

        Raises ProtocolError for rows that point outside the KV, and KvWritten while attention only
        writes.
        """
        x = hidden_states.contiguous()
        call = self._call
        if call.turned.dim and position_embeddings is not None:
            cos, sin = (table.contiguous() for table in position_embeddings)
            call.turned.cos = cos.data_ptr()
            call.turned.sin = sin.data_ptr()
        out = None if self._attention.only_writes else torch.empty_like(x)
        call.x = x.data_ptr()
        call.out = None if out is None else out.data_ptr()
        if (status := self._kernel.run_layer(byref(call))) != 0:
            raise self._attention.refusal(status)
        if out is None:
            raise KvWritten
        return out


class MixedLayer:
    """The forward of a layer with a part that mixes tokens by itself, such as a recurrence: all
    behind that is one call."""

    def __init__(self, kernel: Kernel, parts: LayerParts, call: LayerCall) -> None:
        """Takes the call of what follows the mixer, which owns the memory that it points to."""
        self._kernel = kernel
        self._norm = parts.norms.get("before_attention")
        self._mixer = parts.mixer
        self._call = call

    def takes(self, x: object, _options: Mapping[str, Any]) -> bool:
        """Whether these are hidden states as `forward` needs them."""
        return isinstance(x, Tensor) and _is_packed(x)

    def forward(self, hidden_states: Tensor, *_: Any, **options: Any) -> Tensor:
        """Returns the layer's output [1, T, H] for hidden states [1, T, H], in their dtype.
        `options` go to the mixer, which may raise what it raises."""
        x = hidden_states.contiguous()
        mixed = self._mixer(hidden_states=x if self._norm is None else self._norm(x), **options)
        mixed = mixed if isinstance(mixed, Tensor) else mixed[0]
        mixed = mixed.contiguous()
        out = torch.empty_like(x)
        call = self._call
        rows = call.attention.contents
        rows.num_rows = x.shape[1]
        rows.num_threads = torch.get_num_threads()
        call.x = x.data_ptr()
        call.mixed = mixed.data_ptr()
        call.out = out.data_ptr()
        status = self._kernel.run_layer(byref(call))
        assert status == 0, f"the kernel refuses the layer: {status}"
        return out


Asked = tuple[tuple[Any, ...], dict[str, Any], Any]
"""What a layer was called with, and its output."""
Fused = FusedLayer | MixedLayer | FusedEncoderLayer
FusedLayers = dict[nn.Module, Fused]


def fuse_layers(
    layers: Iterable[nn.Module],
    kernel: Kernel,
    attention: Attention,
    trial: Callable[[], object],
    group: RankGroup | None = None,
) -> FusedLayers:
    """Replaces the forward of each layer that can be one call; returns those. `trial` runs all of
    them once, at positions over the whole context: what a layer does by its position only there is
    seen too.

    `group` has the ranks that compute the layers together, if several do.
    """
    asked: dict[nn.Module, Asked] = {}

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        asked[layer] = args, kwargs, out

    hooks = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    trial()
    for hook in hooks:
        hook.remove()
    fused: FusedLayers = {}
    for layer, call in asked.items():
        candidates = _candidates(layer, kernel, attention, group, call)
        used = (one for one in candidates if _use_fused(layer, one, *call))
        if (one := next(used, None)) is not None:
            fused[layer] = one
    return fused


def _is_packed(x: Tensor) -> bool:
    return x.dim() == 3 and x.shape[0] == 1 and x.dtype in DTYPES


def _tables(options: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Returns the cos and sin that a layer is called with."""
    tables = options.get("position_embeddings")
    return tables if isinstance(tables, tuple) and len(tables) == 2 else None


def _kind(table: Tensor) -> tuple[int, int]:
    """Returns R and the kernel's number of a table's dtype."""
    return table.shape[-1], DTYPES.get(table.dtype, -1)


def _use_fused(
    layer: Any,
    fused: Fused,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    expected: object,
) -> bool:
    """Gives the layer this forward if a call of the layer then returns what it did before."""
    x = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(expected, Tensor) or not fused.takes(x, kwargs):
        return False
    layer.forward = fused.forward
    with suppress(*FAILURES):  # a mixer may want what only the layer's own forward gives it
        if torch.equal(layer(*args, **kwargs), expected):
            return True
    del layer.forward
    return False


def _candidates(
    layer: nn.Module, kernel: Kernel, attention: Attention, group: RankGroup | None, asked: Asked
) -> Iterator[Fused]:
    """Yields what the layer may be as fewer calls, if it has the parts, and no others, that the
    kernel puts together."""
    if (parts := layer_parts(layer, group)) is not None:
        args, options, _ = asked
        yield from _whole_layers(parts, kernel, attention, group, _tables(options))
        x = args[0] if args else options.get("hidden_states")
        if group is None and isinstance(x, Tensor) and x.dtype in DTYPES:
            call = LayerCall(
                **_behind_mixer(parts, None),
                attention=pointer(AttentionCall(dtype=DTYPES[x.dtype])),
            )
            yield MixedLayer(kernel, parts, call)
    elif group is None and (encoder := fused_encoder_layer(layer, kernel, attention)) is not None:
        yield encoder


def _whole_layers(
    parts: LayerParts,
    kernel: Kernel,
    attention: Attention,
    group: RankGroup | None,
    tables: tuple[Tensor, Tensor] | None,
) -> Iterator[FusedLayer]:
    """Yields ways to compute a layer that attends: parts do not show where it turns queries and
    keys, or whether it does."""
    heads = attention_parts(parts.mixer)
    asked = attention.call(getattr(parts.mixer, "layer_idx", -1))
    if heads is None or asked is None or asked.sinks or asked.value_dim != asked.dim:
        return
    out = of_rank(heads.o, group)
    widths = [len(norm.scale) for norm in heads.norms.values()]
    whole = [asked.num_heads * asked.dim, asked.num_kv_heads * asked.dim]
    known: list[list[int]] = [[], [asked.dim] * 2, whole if group is None else []]
    if out is None or widths not in known or heads.qkv.out_features != whole[0] + 2 * whole[1]:
        return
    if group is None and out.in_features != whole[0]:
        return
    for norms_turned in (False, True) if widths else (False,):
        for turned in _rotations(tables, asked.dim):
            call = LayerCall(
                **_behind_mixer(parts, group),
                turned=turned,
                qkv=pointer(heads.qkv.call),
                o=pointer(out.call),
                attention=pointer(asked),
                **{place: norm.norm for place, norm in heads.norms.items()},
                **({} if group is None else _in_ranks(group, heads.o, parts.down)),
                norms_all_heads=widths == whole,
                norms_turned=norms_turned,
            )
            yield FusedLayer(kernel, attention, call)


def _behind_mixer(parts: LayerParts, group: RankGroup | None) -> dict[str, Any]:
    """Returns the fields of a LayerCall that do not depend on how tokens are mixed."""
    down = of_rank(parts.down, group)
    assert down is not None
    return {
        "gate_up": pointer(parts.gate_up.call),
        "down": pointer(down.call),
        **{place: norm.norm for place, norm in parts.norms.items()},
        "activation": parts.mlp.activation,
        "residual_scale": parts.residual_scale,
    }


def _in_ranks(group: RankGroup, o: GatheredLinear, down: GatheredLinear) -> dict[str, Any]:
    """Returns the ranks, and where in a row of inputs and of outputs of each product this one's
    are."""
    assert o.inputs is not None
    assert down.inputs is not None
    return {
        "ranks": pointer(group.call),
        "first_attended": o.inputs.mine.start,
        "first_o": o.outputs.mine.start,
        "first_inner": down.inputs.mine.start,
        "first_down": down.outputs.mine.start,
    }


def _rotations(tables: tuple[Tensor, Tensor] | None, head_dim: int) -> list[Turned]:
    """Returns how these tables may turn heads, and how heads stay as they are."""
    size, dtype = _kind(tables[0]) if tables is not None else (0, -1)
    if dtype < 0 or size % 2 or not 0 < size <= head_dim:
        return [Turned()]
    by_table = [Turned(dim=size, dtype=dtype, neighbors=each) for each in (False, True)]
    return [*by_table, Turned()]
