"""Weights as integers of 4 bits: how they are found, and how they lie in memory for the kernel.

Each output has a scale and a zero point for every group of inputs. Knows no file.

Letters of shapes: K inputs and N outputs of a layer, G groups of inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from services.stage.kernels.kernel import Kernel

GROUP = 32
"""Inputs that share a scale."""
STEP_INPUTS = 64
COLUMN_OUTPUTS = 16
WEIGHT_BYTES = 1 / 2 + 3 / GROUP
"""Of each weight: its number, its shares of a scale of two bytes and of a zero point of one."""
OFFSET = 16
"""Added to weights by the kernel, so that none is negative."""
MOST = 15
AT_ONCE = 1 << 22
"""Weights that are fitted at once, in float32: memory never holds a whole layer of those."""


class Int4(NamedTuple):
    """A weight [N, K]: (numbers - zeros of their groups) * scales of these * scales of outputs."""

    numbers: Tensor
    """uint8 [N, G * GROUP], 0 to 15."""
    zeros: Tensor
    """uint8 [N, G], 0 to 16."""
    scales: Tensor
    """float16 [N, G], 1 to 2 in the largest of an output."""
    outputs: Tensor
    """float32 [N], powers of two."""

    def floats(self) -> Tensor:
        """Returns what the numbers mean, float32 [N, G * GROUP]."""
        signed = self.numbers.unflatten(1, (-1, GROUP)).float() - self.zeros[..., None]
        return (signed * self.scales[..., None].float()).flatten(1) * self.outputs[:, None]


def fitted(kernel: Kernel, weight: Tensor) -> Int4:
    """Returns a weight [N, K] of any float dtype as integers with little squared error: of each
    group several ranges are tried, and the grid of a file of 4 bits is found again."""
    at_once = max(1, AT_ONCE // weight.shape[1])
    parts = [_fitted(kernel, rows.float()) for rows in weight.detach().split(at_once)]
    return gridded(*map(torch.cat, zip(*parts, strict=True)))


def _fitted(kernel: Kernel, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers, zero points and scales of float32 [N, K]."""
    values = functional.pad(rows, (0, -rows.shape[1] % GROUP)).contiguous()
    shape = len(rows), values.shape[1] // GROUP
    numbers = torch.empty(values.shape, dtype=torch.uint8)
    zeros = torch.empty(shape, dtype=torch.uint8)
    scales = torch.empty(shape)
    found = (each.data_ptr() for each in (values, numbers, zeros, scales))
    kernel.fit_int4(*found, zeros.numel(), torch.get_num_threads())
    return numbers, zeros, scales


def gridded(numbers: Tensor, zeros: Tensor, scales: Tensor) -> Int4:
    """Returns the integers of a grid, uint8 [N, G * GROUP] and [N, G], with scales float [N, G].
    These become half precision, in units of the largest of each output."""
    largest = scales.float().abs().amax(1)
    outputs = torch.exp2(torch.frexp(largest).exponent.float() - 1)
    return Int4(numbers, zeros, (scales.float() / outputs[:, None]).half(), outputs)


def packed(weight: Int4) -> Tensor:
    """Returns the weight as the kernel reads it, int8 [bytes] (kernels/int4_steps.h)."""
    num_outputs, num_inputs = weight.numbers.shape
    columns = -(-num_outputs // COLUMN_OUTPUTS)
    steps = -(-num_inputs // STEP_INPUTS)
    groups = STEP_INPUTS // GROUP
    rest = columns * COLUMN_OUTPUTS - num_outputs

    def of_steps(values: Tensor, inputs: int) -> Tensor:
        """[N, ...] as [columns, steps, 16 outputs, inputs of a step]."""
        all_values = functional.pad(values, (0, steps * inputs - values.shape[1], 0, rest))
        return all_values.view(columns, COLUMN_OUTPUTS, steps, inputs).transpose(1, 2)

    halves = of_steps(weight.numbers, STEP_INPUTS).unflatten(3, (groups, -1, 2, 4))
    low, high = halves.permute(0, 1, 3, 4, 5, 2, 6).unbind(4)
    scales = of_steps(weight.scales.view(torch.int16), groups).transpose(2, 3)
    offsets = of_steps(OFFSET - weight.zeros, groups).transpose(2, 3)
    parts = (low | high << 4, scales.contiguous().view(torch.uint8), offsets)
    by_step = [part.reshape(columns, steps, -1) for part in parts]
    return torch.cat(by_step, 2).view(torch.int8).view(-1)
