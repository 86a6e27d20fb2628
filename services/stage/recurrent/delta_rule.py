"""The gated delta rule's mixer: a convolution, a state for each head that is corrected where it
recalls another value for a key, and a gated norm.

Letters of shapes: T packed rows, H the hidden size, N value heads, Nk key heads, D the size of a
key, V that of a value, S slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from services.stage.attention.paged_kv import VECTOR_WIDTH
from services.stage.kernels import recurrent_calls as calls
from services.stage.kernels.kernel import DTYPES
from services.stage.kernels.recurrent_calls import GateOrder
from services.stage.products.trial import child_names
from services.stage.recurrent.convolution import Convolution
from services.stage.recurrent.gated_norm import GatedNorm
from services.stage.recurrent.recurrence import Recurrence, pointer, run, stored
from services.stage.recurrent.states import StateShape, StateShapes
from shardline.base.rounding import round_up

PARTS = frozenset({"conv1d", "norm", "out_proj"})
TOGETHER = PARTS | {"in_proj_qkvz", "in_proj_ba"}
"""Two projections with outputs in the order of key heads."""
APART = PARTS | {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"}
QKV = ("q_proj", "k_proj", "v_proj")
WIDE_APART = frozenset({"conv1d", "o_norm", "o_proj", "g_proj", "b_proj", "a_proj", *QKV})
"""As OLMo names them."""
UNIT_EPS = 1e-6
"""Of the length of queries and keys, as the kernel has it."""


class DeltaRule:
    """Computes a module with the parts of the gated delta rule, which stay where they are."""

    def __init__(self, recurrence: Recurrence, module: Any) -> None:
        self._recurrence = recurrence
        self._module = module
        self._convolution = Convolution(recurrence, module, "conv1d", activates=True)
        self._decay = -module.A_log.detach().float().exp()
        self._dt_bias = stored(module.dt_bias)
        is_wide = hasattr(module, "o_proj")
        self._out = "o_proj" if is_wide else "out_proj"
        norm = module.o_norm if is_wide else module.norm
        eps = norm.variance_epsilon
        heads = module.num_v_heads
        self._norm = GatedNorm(recurrence, norm.weight, eps, GateOrder.NORM_FIRST, num_groups=heads)
        self._most_learned = 2.0 if getattr(module, "allow_neg_eigval", False) else 1.0
        state = (heads, module.head_k_dim, round_up(module.head_v_dim, VECTOR_WIDTH))
        self.shapes: StateShapes = (self._convolution.shape, StateShape(state, torch.float32))

    @staticmethod
    def knows(module: Any) -> bool:
        """Returns whether a module of transformers has the parts: an own class of it may do more,
        which a trial of the miniature sees."""
        children = child_names(module)
        own = {name for name, _ in module.named_parameters(recurse=False)}
        return children in (TOGETHER, APART, WIDE_APART) and own == {"A_log", "dt_bias"}

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        """Maps hidden states [1, T, H] to [1, T, H], in the dtype of the weights."""
        if not self._recurrence.is_bound:
            return hidden_states.new_zeros(hidden_states.shape)
        module = self._module
        x, gate, b, a = self._project(hidden_states)
        window, state = self._recurrence.states(module.layer_idx)
        answered = self._apply(state, self._convolution(window, x), a, b)
        project: nn.Module = getattr(module, self._out)
        mixed: Tensor = project(self._norm(answered, gate)[None])
        return mixed

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns queries, keys and values side by side, [T, 2 Nk D + N V], gates [T, N V], and
        what decides how much is learned and kept, [T, N] each."""
        module = self._module
        if not hasattr(module, "in_proj_qkvz"):
            is_wide = hasattr(module, "o_proj")
            of_x = QKV if is_wide else ("in_proj_qkv",)
            others = ("g_proj", "b_proj", "a_proj")
            if not is_wide:
                others = ("in_proj_z", "in_proj_b", "in_proj_a")
            x = [getattr(module, name)(hidden_states)[0] for name in of_x]
            gate, b, a = (getattr(module, name)(hidden_states)[0] for name in others)
            return torch.cat(x, -1), gate, b.contiguous(), a.contiguous()
        parts = module.fix_query_key_value_ordering(
            module.in_proj_qkvz(hidden_states), module.in_proj_ba(hidden_states)
        )
        query, key, value, gate, b, a = (each[0].flatten(1) for each in parts)
        return torch.cat([query, key, value], -1), gate, b.contiguous(), a.contiguous()

    def _apply(self, state: Tensor, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Returns float32 [T, N * V] for queries, keys and values side by side. Changes `state`,
        float32 [S, N, D, V padded]. Padding rows are zeros."""
        module = self._module
        kernel = self._recurrence.kernel
        if kernel is None:
            return self._through_torch(state, x, a, b)
        query, key, value = x.split([module.key_dim, module.key_dim, module.value_dim], dim=-1)
        out = x.new_zeros(len(x), module.value_dim, dtype=torch.float32)
        call = calls.DeltaCall(
            self._recurrence.call_rows(),
            *(pointer(each) for each in (query, key, value, a, b, out, state)),
            *(pointer(each) for each in (self._decay, self._dt_bias)),
            *(x.stride(0), a.stride(0)),
            *(module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim),
            DTYPES[x.dtype],
            self._most_learned,
        )
        run(kernel.apply_delta, call)
        return out

    def _through_torch(self, state: Tensor, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        module = self._module
        query, key, value = x.split([module.key_dim, module.key_dim, module.value_dim], dim=-1)
        repeats = module.num_v_heads // module.num_k_heads
        keys = (module.num_k_heads, module.head_k_dim)
        query, key = (
            _unit(each.float().unflatten(-1, keys)).repeat_interleave(repeats, 1)[..., None]
            for each in (query, key)
        )
        query = query * module.head_k_dim**-0.5
        value = value.float().unflatten(-1, (module.num_v_heads, module.head_v_dim))
        learned = b.float().sigmoid()[..., None] * self._most_learned
        steps = functional.softplus(a.float() + self._dt_bias.to(a.device))
        kept = (self._decay.to(a.device) * steps).exp()[..., None, None]
        out = torch.zeros_like(value)
        for rows, own in self._recurrence.each_sequence(state):
            used = own[..., : module.head_v_dim]
            for row in range(rows.start, rows.stop):
                used.mul_(kept[row])
                change = (value[row] - (used * key[row]).sum(-2)) * learned[row]
                used.add_(key[row] * change[:, None])
                out[row] = (used * query[row]).sum(-2)
        return out.flatten(1)


def _unit(x: Tensor) -> Tensor:
    """Returns vectors [..., D] of length 1, nearly."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + UNIT_EPS)
