"""A causal convolution over the tokens of each sequence, every channel alone: its state is a window
of the last inputs.

Letters of shapes: T packed rows, C channels, K tokens that the convolution spans, S slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from services.stage.kernels import recurrent_calls as calls
from services.stage.kernels.kernel import DTYPES
from services.stage.recurrent.recurrence import Recurrence, pointer, run, stored
from services.stage.recurrent.states import StateShape

WIDTHS = frozenset({2, 3, 4})
"""Those that the kernel has."""


class Convolution:
    """Takes over the weights of a module's depthwise Conv1d of torch."""

    def __init__(
        self, recurrence: Recurrence, module: nn.Module, name: str, *, activates: bool
    ) -> None:
        """`activates`: applies SiLU to the outputs. The module is left without the weights."""
        self._recurrence = recurrence
        conv: Any = module.get_submodule(name)
        weight: Tensor = conv.weight
        self.num_channels, _, self.width = weight.shape
        self._weight = weight.detach().to(torch.float32, copy=True).squeeze(1).T.contiguous()
        self._bias = None if conv.bias is None else stored(conv.bias)
        self._activates = activates
        self._has_kernel = self.width in WIDTHS
        recurrence.has_kernels &= self._has_kernel
        setattr(module, name, nn.Identity())
        self.shape = StateShape((self.width - 1, self.num_channels), weight.dtype)

    def __call__(
        self, state: Tensor, x: Tensor, before: Tensor | None = None, after: Tensor | None = None
    ) -> Tensor:
        """Returns after * silu(conv(before * x)): all [T, C] of the weights' dtype, rows equally
        far apart; a factor that is not given is left out. Changes `state`, [S, K - 1, C]. Padding
        rows are zeros."""
        if self._recurrence.kernel is None or not self._has_kernel:
            return self._through_torch(state, x, before, after)
        out = x.new_zeros(x.shape)
        call = calls.ConvolutionCall(
            self._recurrence.call_rows(),
            *(pointer(each) for each in (x, before, after, out, state, self._weight, self._bias)),
            self.num_channels,
            x.stride(0),
            self.width,
            self._activates,
            DTYPES[x.dtype],
        )
        run(self._recurrence.kernel.convolve, call)
        return out

    def _through_torch(
        self, state: Tensor, x: Tensor, before: Tensor | None, after: Tensor | None
    ) -> Tensor:
        out = x.new_zeros(x.shape)
        inputs = x if before is None else before * x
        for rows, window in self._recurrence.each_sequence(state):
            line = torch.cat([window, inputs[rows]])
            weight = self._weight.T[:, None].to(line)
            bias = None if self._bias is None else self._bias.to(line)
            convolved = functional.conv1d(line.T[None], weight, bias, groups=self.num_channels)
            out[rows] = convolved[0].T
            window.copy_(line[len(line) - len(window) :])
        out = functional.silu(out) if self._activates else out
        return out if after is None else after * out
