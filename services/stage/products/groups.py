"""Weights as integers with scales for groups of inputs: how they are found, and how they lie in
memory for the kernel.

Integers of 4 bits have a minimum for each group, too. Knows no file.

Letters of shapes: K inputs and N outputs of a layer, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from services.stage.kernels.kernel import Kernel

GROUP = 32
"""Inputs that share a scale."""
STEP_INPUTS = 64
COLUMN_OUTPUTS = 16
INT4_BYTES = 1 / 2 + 4 / GROUP
"""Of each weight: its number, its shares of a scale and a minimum of two bytes each."""
INT8_BYTES = 1 + 2 / GROUP
INT4_MOST = 15
INT8_MOST = 127
AT_ONCE = 1 << 22
"""Weights that are fitted at once, in float32: memory never holds a whole layer of those."""


class Int4Groups(NamedTuple):
    """A weight [N, K]: (numbers * scales of their groups + minimums of these) * scales of
    outputs."""

    numbers: Tensor
    """uint8 [N, G * GROUP], 0 to 15."""
    scales: Tensor
    """float16 [N, G]."""
    minimums: Tensor
    """float16 [N, G]."""
    outputs: Tensor
    """float32 [N], powers of two."""

    def floats(self) -> Tensor:
        """Returns what the numbers mean, float32 [N, G * GROUP]."""
        groups = self.numbers.unflatten(1, (-1, GROUP)) * self.scales[..., None].float()
        return (groups + self.minimums[..., None].float()).flatten(1) * self.outputs[:, None]


class ZeroPointGroups(NamedTuple):
    """A weight [N, K]: (numbers + minimums of their groups) * scales of these * scales of
    outputs."""

    numbers: Tensor
    """uint8 [N, G * GROUP], 0 to 15."""
    scales: Tensor
    """float16 [N, G]."""
    minimums: Tensor
    """float16 [N, G], whole numbers from -16 to 0."""
    outputs: Tensor
    """float32 [N], powers of two."""

    def floats(self) -> Tensor:
        """Returns what the numbers mean, float32 [N, G * GROUP]."""
        groups = self.numbers.unflatten(1, (-1, GROUP)) + self.minimums[..., None].float()
        return (groups * self.scales[..., None].float()).flatten(1) * self.outputs[:, None]

    def with_minimums(self) -> Int4Groups:
        """Returns the groups with minimums in half precision: exact for a zero point of 8."""
        minimums = (self.minimums.float() * self.scales.float()).half()
        return Int4Groups(self.numbers, self.scales, minimums, self.outputs)


class Int8Groups(NamedTuple):
    """A weight [N, K]: numbers * scales of their groups * scales of outputs."""

    numbers: Tensor
    """int8 [N, G * GROUP], -127 to 127."""
    scales: Tensor
    """float16 [N, G]."""
    outputs: Tensor
    """float32 [N], powers of two."""

    def floats(self) -> Tensor:
        """Returns what the numbers mean, float32 [N, G * GROUP]."""
        groups = self.numbers.unflatten(1, (-1, GROUP)) * self.scales[..., None].float()
        return groups.flatten(1) * self.outputs[:, None]


Groups = Int4Groups | ZeroPointGroups | Int8Groups


class Tiles(NamedTuple):
    """A weight [N, K] as the kernel reads it (kernels/group_steps.h)."""

    data: Tensor
    """int8 [bytes]: the columns of outputs in 4 bits, then those in 8."""
    outputs: Tensor
    """float32 [N], their scales."""
    first_int8: int
    """The first output that is in 8 bits."""
    has_zeros: bool
    """Those in 4 bits are `ZeroPointGroups`."""


def fitted(kernel: Kernel, weight: Tensor) -> Int4Groups:
    """Returns a weight [N, K] of any float dtype as integers with little squared error: of each
    group several ranges are tried, and the grid of a file of 4 bits is found again."""
    at_once = max(1, AT_ONCE // weight.shape[1])
    parts = [_fitted(kernel, rows.float()) for rows in weight.detach().split(at_once)]
    return gridded(*map(torch.cat, zip(*parts, strict=True)))


def _fitted(kernel: Kernel, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers, scales and minimums of float32 [N, K]."""
    values = _whole_groups(rows).contiguous()
    shape = len(rows), values.shape[1] // GROUP
    numbers = torch.empty(values.shape, dtype=torch.uint8)
    scales = torch.empty(shape)
    minimums = torch.empty(shape)
    found = (each.data_ptr() for each in (values, numbers, scales, minimums))
    kernel.fit_int4(*found, scales.numel(), torch.get_num_threads())
    return numbers, scales, minimums


def gridded(numbers: Tensor, scales: Tensor, minimums: Tensor) -> Int4Groups:
    """Returns the integers of a grid, uint8 [N, G * GROUP], with scales and minimums float [N, G].
    These become half precision, in units of the largest of each output."""
    sizes = torch.maximum(scales.float().abs(), minimums.float().abs() / (INT4_MOST + 1))
    outputs = _powers(sizes.amax(1))
    scales, minimums = (each.float() / outputs[:, None] for each in (scales, minimums))
    return Int4Groups(numbers, scales.half(), minimums.half(), outputs)


def zero_pointed(numbers: Tensor, scales: Tensor, zeros: Tensor) -> ZeroPointGroups:
    """Returns the integers of a grid, uint8 [N, G * GROUP], with scales float [N, G] and zero
    points int [N, G]. Scales become half precision, in units of a power of two of each output."""
    outputs = _powers(scales.float().abs().amax(1))
    if scales.dtype == torch.float16:
        outputs = outputs.clamp(max=1)  # divided by more, small ones would lose digits
    stored = (scales.float() / outputs[:, None]).half()
    return ZeroPointGroups(numbers, stored, -zeros.half(), outputs)


def rounded(weight: Tensor) -> Int8Groups:
    """Returns a weight [N, K] of any float dtype as integers of 8 bits."""
    at_once = max(1, AT_ONCE // weight.shape[1])
    parts = [_rounded(rows.float()) for rows in weight.detach().split(at_once)]
    return Int8Groups(*map(torch.cat, zip(*parts, strict=True)))


def _rounded(rows: Tensor) -> Int8Groups:
    values = _whole_groups(rows).unflatten(1, (-1, GROUP))
    scales = values.abs().amax(2) / INT8_MOST
    outputs = _powers(scales.amax(1))
    stored = (scales / outputs[:, None]).half()
    steps = stored.float() * outputs[:, None]
    numbers = (values / steps.clamp(min=torch.finfo(torch.float32).tiny)[..., None]).round()
    return Int8Groups(
        numbers.clamp(-INT8_MOST, INT8_MOST).to(torch.int8).flatten(1), stored, outputs
    )


def scaled(numbers: Tensor, scales: Tensor) -> Int8Groups:
    """Returns integers of 8 bits, int8 [N, G * GROUP], with scales float [N, G]."""
    outputs = _powers(scales.float().abs().amax(1))
    stored = (scales.float() / outputs[:, None]).half()
    return Int8Groups(numbers.clamp(min=-INT8_MOST), stored, outputs)


def in_8_bits(weight: Groups) -> Int8Groups:
    """Returns a weight [N, K] in groups of 8 bits, itself if it is."""
    if isinstance(weight, Int8Groups):
        return weight
    at_once = max(1, AT_ONCE // weight.numbers.shape[1])
    kind = type(weight)
    rows = zip(*(each.split(at_once) for each in weight), strict=True)
    return Int8Groups(
        *map(torch.cat, zip(*(rounded(kind(*part).floats()) for part in rows), strict=True))
    )


def tiled(parts: Sequence[Groups]) -> Tiles:
    """Returns weights [.., K] as one [N, K]. One in 4 bits behind one in 8 is rounded to 8, as is
    one that ends within a column of outputs; zero points become minimums if a part has these."""
    in_4_bits = [*takewhile(lambda part: not isinstance(part, Int8Groups), parts)]
    first_int8 = sum(len(part.numbers) for part in in_4_bits)
    if len(in_4_bits) < len(parts) and first_int8 % COLUMN_OUTPUTS:
        in_4_bits, first_int8 = [], 0
    others = list(map(in_8_bits, parts[len(in_4_bits) :]))
    has_zeros = all(isinstance(part, ZeroPointGroups) for part in in_4_bits)
    if not has_zeros:
        in_4_bits = [
            part.with_minimums() if isinstance(part, ZeroPointGroups) else part
            for part in in_4_bits
        ]
    data = [
        _tiled(list(map(torch.cat, zip(*each, strict=True))), has_halves=each is in_4_bits)
        for each in (in_4_bits, others)
        if each
    ]
    outputs = torch.cat([part.outputs for part in (*in_4_bits, *others)])
    return Tiles(torch.cat(data), outputs, first_int8, has_zeros)


def _tiled(fields: list[Tensor], *, has_halves: bool) -> Tensor:
    numbers, *of_groups, _ = fields
    columns = -(-len(numbers) // COLUMN_OUTPUTS)
    steps = -(-numbers.shape[1] // STEP_INPUTS)
    groups = STEP_INPUTS // GROUP
    rest = columns * COLUMN_OUTPUTS - len(numbers)

    def of_steps(values: Tensor, inputs: int) -> Tensor:
        """[N, ...] as [columns, steps, 16 outputs, inputs of a step]."""
        all_values = functional.pad(values, (0, steps * inputs - values.shape[1], 0, rest))
        return all_values.view(columns, COLUMN_OUTPUTS, steps, inputs).transpose(1, 2)

    lines = of_steps(numbers, STEP_INPUTS).unflatten(3, (-1, 4)).transpose(2, 3)
    if has_halves:
        lines = lines[:, :, ::2] | lines[:, :, 1::2] << 4
    scales = (of_steps(each.view(torch.int16), groups).transpose(2, 3) for each in of_groups)
    parts = (lines, *(each.contiguous().view(torch.uint8) for each in scales))
    by_step = [part.reshape(columns, steps, -1).view(torch.int8) for part in parts]
    return torch.cat(by_step, 2).view(-1)


def looked_up(tiles: Tensor, num_inputs: int, outputs: Tensor) -> Tensor:
    """Returns rows of a weight [N, K] in 8 bits, by their numbers int64 [R], without the scales of
    outputs, float32 [R, K]. `tiles` is its `Tiles.data`."""
    steps = -(-num_inputs // STEP_INPUTS)
    in_step = tiles.view(-1, steps, round(STEP_INPUTS * COLUMN_OUTPUTS * INT8_BYTES))
    num_numbers = STEP_INPUTS * COLUMN_OUTPUTS
    numbers, scales = in_step[:, :, :num_numbers], in_step[:, :, num_numbers:]
    column, output = outputs // COLUMN_OUTPUTS, outputs % COLUMN_OUTPUTS
    lines = numbers.unflatten(2, (-1, COLUMN_OUTPUTS, 4))[column, :, :, output]
    of_groups = scales.view(torch.float16).unflatten(2, (-1, COLUMN_OUTPUTS))[column, :, :, output]
    groups = lines.reshape(len(outputs), -1, GROUP) * of_groups.reshape(len(outputs), -1, 1).float()
    return groups.flatten(1)[:, :num_inputs]


def _whole_groups(rows: Tensor) -> Tensor:
    return functional.pad(rows, (0, -rows.shape[1] % GROUP))


def _powers(values: Tensor) -> Tensor:
    """The powers of two that are at most the values, float32 [N]; 1/2 for zeros."""
    return torch.exp2(torch.frexp(values).exponent.float() - 1)
