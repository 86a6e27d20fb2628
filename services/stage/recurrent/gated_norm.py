"""The norm behind a recurrence, with a gate: RMSNorm of groups of each row.

Letters of shapes: T packed rows, G groups of a row, D the size of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from services.stage.kernels import recurrent_calls as calls
from services.stage.kernels.kernel import DTYPES
from services.stage.kernels.recurrent_calls import GateOrder
from services.stage.recurrent.recurrence import Recurrence, pointer, run, stored


class GatedNorm:
    """Multiplies by the SiLU of a gate before the norm, behind it, or without one."""

    def __init__(
        self,
        recurrence: Recurrence,
        weight: Tensor | None,
        eps: float,
        order: GateOrder,
        *,
        num_groups: int,
    ) -> None:
        """`weight` is [G * D], or [D] for all groups, of any float dtype."""
        self._recurrence = recurrence
        self._weight = None if weight is None else stored(weight)
        self._eps = eps
        self._order = order
        self._num_groups = num_groups

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """Returns [T, G * D] in the gate's dtype: x is float32 [T, G * D], dense, the gate
        [T, G * D], rows any distance apart."""
        num_rows, width = x.shape
        dim = width // self._num_groups
        kernel = self._recurrence.kernel
        if kernel is None:
            return self._through_torch(x, gate)
        out = gate.new_empty(x.shape)
        weight = x if self._weight is None else self._weight
        call = calls.GateCall(
            *(pointer(each) for each in (x, weight, gate, out)),
            *(num_rows, self._num_groups, dim, gate.stride(0)),
            0 if weight.numel() == dim else dim,
            self._order,
            DTYPES[gate.dtype],
            torch.get_num_threads(),
            self._eps,
        )
        run(kernel.gate, call)
        return out

    def _through_torch(self, x: Tensor, gate: Tensor) -> Tensor:
        opened = functional.silu(gate.float())
        if self._order is not GateOrder.NORM_FIRST:
            x = x * opened
        if self._weight is not None and self._order is not GateOrder.GATE_ALONE:
            groups = x.unflatten(-1, (self._num_groups, -1))
            scale = torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + self._eps)
            weight = self._weight.to(x.device).view(-1, groups.shape[-1])
            x = (groups * scale * weight).flatten(-2)
        if self._order is GateOrder.NORM_FIRST:
            x = x * opened
        return x.to(gate.dtype)
