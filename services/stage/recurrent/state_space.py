"""Mamba-2's mixer: a convolution, a state for each head with a separate time step, and a
gated norm.

Letters of shapes: T packed rows, H the hidden size, N heads, P the size of a head, D that of its
state, S slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
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

PARTS = frozenset({"in_proj", "conv1d", "out_proj", "norm"})
PARAMETERS = frozenset({"A_log", "D", "dt_bias"})


class StateSpace:
    """Computes a module with Mamba-2's parts, which stay where they are."""

    def __init__(self, recurrence: Recurrence, module: Any) -> None:
        self._recurrence = recurrence
        self._module = module
        self._convolution = Convolution(recurrence, module, "conv1d", activates=True)
        self._decay = -module.A_log.detach().float().exp()
        self._skip, self._dt_bias = stored(module.D), stored(module.dt_bias)
        self._least_dt, self._most_dt = (float(each) for each in module.time_step_limit)
        self._inner = module.num_heads * module.head_dim
        self._norm = _norm_of(recurrence, module)
        state = (module.num_heads, module.head_dim, round_up(module.ssm_state_size, VECTOR_WIDTH))
        self.shapes: StateShapes = (self._convolution.shape, StateShape(state, torch.float32))

    @staticmethod
    def knows(module: Any) -> bool:
        """Returns whether a module of transformers has the parts: an own class of it may do more,
        which a trial of the miniature sees."""
        children = child_names(module) - {"act"}
        own = {name for name, _ in module.named_parameters(recurse=False)}
        return children == PARTS and own == PARAMETERS

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        """Maps hidden states [1, T, H] to [1, T, H], in the dtype of the weights."""
        if not self._recurrence.is_bound:
            return hidden_states.new_zeros(hidden_states.shape)
        module = self._module
        scale = getattr(module, "ssm_in_multiplier", None)
        projected = module.in_proj(hidden_states if scale is None else hidden_states * scale)
        if (factors := getattr(module, "mup_vector", None)) is not None:
            projected = projected * factors
        sizes = [self._inner, self._convolution.num_channels, module.num_heads]
        gate, x, dt = projected[0].split(sizes, dim=-1)
        window, state = self._recurrence.states(module.layer_idx)
        scanned = self._scan(state, self._convolution(window, x), dt)
        mixed: Tensor = module.out_proj(self._norm(scanned, gate)[None])
        return mixed

    def _scan(self, state: Tensor, x: Tensor, dt: Tensor) -> Tensor:
        """Returns float32 [T, N * P] for what the convolution gave, [T, N * P + 2 groups of D], and
        steps [T, N], both of one dtype. Changes `state`, float32 [S, N, P, D padded]. Padding rows
        are zeros."""
        module = self._module
        kernel = self._recurrence.kernel
        groups = module.n_groups * module.ssm_state_size
        own, b, c = x.split([self._inner, groups, groups], dim=-1)
        if kernel is None:
            return self._through_torch(state, (own, b, c), dt)
        out = x.new_zeros(len(x), self._inner, dtype=torch.float32)
        call = calls.ScanCall(
            self._recurrence.call_rows(),
            *(pointer(each) for each in (own, b, c, dt, out, state)),
            *(pointer(each) for each in (self._decay, self._skip, self._dt_bias)),
            *(x.stride(0), dt.stride(0)),
            *(module.num_heads, module.head_dim, module.n_groups, module.ssm_state_size),
            DTYPES[x.dtype],
            self._least_dt,
            self._most_dt,
        )
        run(kernel.scan, call)
        return out

    def _through_torch(self, state: Tensor, parts: tuple[Tensor, ...], dt: Tensor) -> Tensor:
        module = self._module
        x, b, c = parts
        repeats = module.num_heads // module.n_groups
        groups = (module.n_groups, module.ssm_state_size)
        b, c = (each.float().unflatten(-1, groups) for each in (b, c))
        b, c = (each.repeat_interleave(repeats, 1)[:, :, None] for each in (b, c))
        values = x.float().unflatten(-1, (module.num_heads, module.head_dim))
        steps = functional.softplus(dt.float() + self._dt_bias.to(dt.device))
        steps = steps.clamp(self._least_dt, self._most_dt)[:, :, None, None]
        kept = (steps * self._decay.to(dt.device)[:, None, None]).exp()
        added = steps * values[..., None] * b
        out = torch.zeros_like(values)
        for rows, own in self._recurrence.each_sequence(state):
            used = own[..., : module.ssm_state_size]
            for row in range(rows.start, rows.stop):
                used.mul_(kept[row]).add_(added[row])
                out[row] = (used * c[row]).sum(-1)
        out += values * self._skip.to(dt.device)[:, None]
        return out.flatten(1)


def _norm_of(recurrence: Recurrence, module: Any) -> GatedNorm:
    norm = module.norm
    weight = getattr(norm, "weight", None)
    if weight is None:
        return GatedNorm(recurrence, None, 0.0, GateOrder.GATE_ALONE, num_groups=1)
    is_before = getattr(norm, "norm_before_gate", False)
    order = GateOrder.NORM_FIRST if is_before else GateOrder.GATE_FIRST
    size = getattr(norm, "group_size", None)
    num_groups = norm.n_groups if size is None else weight.numel() // size
    return GatedNorm(recurrence, weight, norm.variance_epsilon, order, num_groups=num_groups)
