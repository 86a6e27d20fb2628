"""Quantized checkpoints: which tensors make one weight, and its float values. Knows no file and no
shard.

A packed word has 32 bits, its first number in the lowest ones. Letters of shapes: O outputs, I
inputs of a linear layer, G groups of inputs that share a scale, P numbers in a word.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import nan
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from services.stage.model.refusal import refuse

REMEDY = "Give the float checkpoint, or one in compressed-tensors, GPTQ, AWQ, fp8 or MXFP4"
WORD_BITS = 32
BITS = (4, 8)
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where a word of AWQ holds the number of each output."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the codes of 4 bits mean in MXFP4; those from 8 are negative."""
E2M1_BYTES = 16
"""Of a group: two numbers each."""
E8M0_BIAS = 127

Parts = Mapping[str, Tensor]
"""The tensors of one linear layer that a checkpoint has, by their names behind its own."""


class Quantization(ABC):
    """A format of packed weights."""

    parts: ClassVar[tuple[str, ...]]
    """Names behind the name of a linear layer: the first one tells that it is quantized."""
    joint: ClassVar[str] = "."
    """Between the name of a layer and those of its parts."""
    suffix: ClassVar[str] = ".weight"
    """Behind the name of a layer, in the model's name of its weight."""
    reading: str = ""
    """In the names of folders of floats: another once parts come to mean other weights."""

    @abstractmethod
    def weight(self, parts: Parts) -> Tensor:
        """Returns the weight [O, I] in a float dtype that holds it. Raises ValueError for parts
        that do not belong together."""


class Sizes(NamedTuple):
    """Sizes of a packed linear layer."""

    bits: int
    num_outputs: int
    num_inputs: int
    num_groups: int


class Grid(NamedTuple):
    """A packed weight [O, I]: (numbers - zero points of their groups) * scales of these."""

    bits: int
    numbers: Tensor
    """int32 [O, I], not negative."""
    zeros: Tensor
    """int32 [O, G]."""
    scales: Tensor
    """Float [O, G]."""
    groups: Tensor
    """int64 [I]: the group of each input."""

    def floats(self) -> Tensor:
        """Returns what the numbers mean, float32 [O, I]."""
        return (self.numbers - self.zeros[:, self.groups]) * self.scales.float()[:, self.groups]


class PackedQuantization(Quantization):
    """A format of integers with a scale and a zero point for each group of inputs."""

    def weight(self, parts: Parts) -> Tensor:
        """Returns the weight [O, I] in float32."""
        return self.grid(parts, self.sizes(parts)).floats()

    @abstractmethod
    def grid(self, parts: Parts, sizes: Sizes) -> Grid:
        """Returns the numbers of a linear layer."""

    @abstractmethod
    def sizes(self, parts: Parts) -> Sizes:
        """Returns the sizes of a linear layer. Parts that are larger than a vector may be without
        values."""

    @abstractmethod
    def rows(self, parts: Parts, sizes: Sizes, outputs: range) -> Parts:
        """Returns the parts of some outputs, which begin with a word."""

    @staticmethod
    def groups(parts: Parts, sizes: Sizes, name: str) -> Tensor:
        """Returns the group of each input, int64 [I]: those of the part with this name, if there is
        one."""
        found = parts.get(name)
        if found is not None and (found >= 0).all():
            return found.long()
        return torch.arange(sizes.num_inputs) // max(1, sizes.num_inputs // sizes.num_groups)


class Gptq(PackedQuantization):
    """Inputs packed along rows: `qweight` int32 [I/P, O], `qzeros` int32 [G, O/P], `scales` [G, O],
    `g_idx` [I]."""

    parts = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, *, zeros_are_less: int) -> None:
        """Takes how much less than meant the zero points are that the files hold."""
        self._zeros_are_less = zeros_are_less
        self.reading = "-words" if zeros_are_less else ""

    def grid(self, parts: Parts, sizes: Sizes) -> Grid:
        """Returns the numbers of a linear layer."""
        # Writers subtract from whole words: a zero point of 0 borrows from the next number.
        less = sum(self._zeros_are_less << place for place in range(0, WORD_BITS, sizes.bits))
        zeros = unpacked(parts["qzeros"] + less, sizes.bits)[:, : sizes.num_outputs]
        return Grid(
            sizes.bits,
            unpacked(parts["qweight"].T, sizes.bits),
            zeros.T,
            parts["scales"].T,
            self.groups(parts, sizes, "g_idx"),
        )

    def sizes(self, parts: Parts) -> Sizes:
        """Returns the sizes of a linear layer by its shapes: `dynamic` in the config may give some
        layers other bits than the model's."""
        num_groups, num_outputs = parts["scales"].shape
        words = parts["qzeros"].shape[1]
        found = [bits for bits in BITS if -(-num_outputs * bits // WORD_BITS) == words]
        if not found:
            refuse(
                f"zero points of {num_outputs} outputs in {words} words "
                "are of neither 4 nor 8 bits",
                REMEDY,
            )
        num_inputs = len(parts["qweight"]) * WORD_BITS // found[0]
        return Sizes(found[0], num_outputs, num_inputs, num_groups)

    def rows(self, parts: Parts, sizes: Sizes, outputs: range) -> Parts:
        """Returns the parts of some outputs, which begin with a word."""
        columns = slice(outputs.start, outputs.stop)
        words = _words(outputs, sizes.bits)
        sliced = {"qweight": columns, "scales": columns, "qzeros": words}
        return {**parts, **{name: parts[name][:, each] for name, each in sliced.items()}}


class Awq(PackedQuantization):
    """Outputs packed along columns: `qweight` int32 [I, O/P], `qzeros` int32 [G, O/P], `scales` [G,
    O]."""

    parts = ("qweight", "qzeros", "scales")

    def grid(self, parts: Parts, sizes: Sizes) -> Grid:
        """Returns the numbers of a linear layer."""
        numbers, zeros = (
            self._unpacked(parts[name])[:, : sizes.num_outputs].T for name in ("qweight", "qzeros")
        )
        return Grid(sizes.bits, numbers, zeros, parts["scales"].T, self.groups(parts, sizes, ""))

    def sizes(self, parts: Parts) -> Sizes:
        """Returns the sizes of a linear layer."""
        if "qzeros" not in parts:
            refuse("it is quantized by AWQ without zero points (qzeros)", REMEDY)
        num_groups, num_outputs = parts["scales"].shape
        return Sizes(4, num_outputs, len(parts["qweight"]), num_groups)

    def rows(self, parts: Parts, sizes: Sizes, outputs: range) -> Parts:
        """Returns the parts of some outputs, which begin with a word."""
        columns = slice(outputs.start, outputs.stop)
        words = _words(outputs, sizes.bits)
        sliced = {"qweight": words, "scales": columns, "qzeros": words}
        return {name: parts[name][:, each] for name, each in sliced.items()}

    @staticmethod
    def _unpacked(words: Tensor) -> Tensor:
        numbers = unpacked(words, 4).view(len(words), -1, len(AWQ_PLACES))
        return numbers[:, :, list(AWQ_PLACES)].reshape(len(words), -1)


class PackedIntegers(PackedQuantization):
    """Reads compressed-tensors: `weight_packed` int32 [O, I/P], `weight_scale` [O, G],
    `weight_zero_point` int32 [O/P, G], `weight_g_idx` [I]."""

    parts = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape")

    def grid(self, parts: Parts, sizes: Sizes) -> Grid:
        """Returns the numbers of a linear layer."""
        scales = _for_outputs(parts["weight_scale"], sizes.num_outputs)
        zeros = torch.full(scales.shape, 1 << (sizes.bits - 1), dtype=torch.int32)
        if "weight_zero_point" in parts:
            zeros = unpacked(parts["weight_zero_point"].T, sizes.bits).T[: sizes.num_outputs]
        numbers = unpacked(parts["weight_packed"], sizes.bits)[:, : sizes.num_inputs]
        groups = self.groups(parts, sizes, "weight_g_idx")
        return Grid(sizes.bits, numbers, zeros, scales, groups)

    def sizes(self, parts: Parts) -> Sizes:
        """Returns the sizes of a linear layer by its shapes."""
        words = parts["weight_packed"]
        num_outputs, num_inputs = (int(size) for size in parts["weight_shape"])
        found = [bits for bits in BITS if -(-num_inputs * bits // WORD_BITS) == words.shape[1]]
        if not found:
            refuse(
                f"weights of {num_inputs} inputs in {words.shape[1]} words "
                "are of neither 4 nor 8 bits",
                REMEDY,
            )
        scale = parts["weight_scale"]
        return Sizes(found[0], num_outputs, num_inputs, scale.shape[1] if scale.dim() > 1 else 1)

    def rows(self, parts: Parts, sizes: Sizes, outputs: range) -> Parts:
        """Returns the parts of some outputs, which begin with a word."""
        scale = _for_outputs(parts["weight_scale"], sizes.num_outputs)
        sliced = {"weight_packed": parts["weight_packed"], "weight_scale": scale}
        found = {name: each[outputs.start : outputs.stop] for name, each in sliced.items()}
        if "weight_zero_point" in parts:
            zeros = parts["weight_zero_point"]
            found["weight_zero_point"] = zeros[_words(outputs, sizes.bits)]
        return {**parts, **found}


class ScaledQuantization(Quantization):
    """Numbers of one byte, int8 or fp8, [O, I], with a scale for the whole, for each row, group or
    block."""

    parts = ("weight", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_scale_inv")

    def __init__(self, block: tuple[int, int] | None = None) -> None:
        """Takes the outputs and inputs of a block that has one scale."""
        self._block = block

    def weight(self, parts: Parts) -> Tensor:
        """Returns the weight [O, I], or of fused experts in blocks [experts, O, I], in float32; one
        without a scale, which is not quantized, as it is."""
        scale = parts.get("weight_scale", parts.get("weight_scale_inv"))
        if scale is None:
            return parts["weight"]
        numbers = parts["weight"].float()
        if "weight_zero_point" in parts:
            zeros = parts["weight_zero_point"].float()
            numbers = numbers - _spread(zeros, numbers.shape, parts.get("weight_g_idx"))
        if self._block is not None:
            rows, columns = self._block
            blocks = scale.float().repeat_interleave(rows, -2).repeat_interleave(columns, -1)
            return numbers * blocks[..., : numbers.shape[-2], : numbers.shape[-1]]
        if numbers.dim() > 2:
            raise ValueError("experts in one tensor have scales that are not of blocks")
        return numbers * _spread(scale.float(), numbers.shape, parts.get("weight_g_idx"))


class Mxfp4(Quantization):
    """Experts of gpt-oss: `blocks` uint8 [experts, O, G, 16], two numbers in a byte, the first in
    its low bits; `scales` uint8 [experts, O, G], exponents of 2. All other weights are floats."""

    parts = ("blocks", "scales")
    joint = "_"
    suffix = ""

    def weight(self, parts: Parts) -> Tensor:
        """Returns the weights [experts, I, O] in bfloat16, which holds each: the model has them
        transposed. While it runs memory holds one more expert."""
        shape = self.shape(parts)
        blocks, scales = parts["blocks"], parts["scales"]
        powers = e8m0_powers().bfloat16()
        # A pair of bfloat16 has the size of an int32: one look-up finds both.
        table = e2m1_pairs().bfloat16().view(torch.int32).flatten()
        weights = torch.empty(shape, dtype=torch.bfloat16)
        for expert, weight in enumerate(weights):
            found = table.index_select(0, blocks[expert].int().flatten()).view(torch.bfloat16)
            numbers = found.view(*scales[expert].shape, -1)
            numbers *= powers[scales[expert].int()][..., None]
            if not numbers.abs().amax().isfinite():
                raise ValueError(f"expert {expert} has a scale that is not finite in bfloat16")
            weight.copy_(numbers.flatten(1).T)
        return weights

    @staticmethod
    def shape(parts: Parts) -> tuple[int, int, int]:
        """Returns experts, I and O. Raises ValueError for parts, with or without values, that do
        not belong together."""
        blocks, scales = parts["blocks"], parts["scales"]
        if blocks.dim() != 4 or blocks.shape != (*scales.shape, E2M1_BYTES):
            shapes = f"{list(blocks.shape)} and {list(scales.shape)}"
            raise ValueError(f"blocks and scales have the shapes {shapes}")
        if {blocks.dtype, scales.dtype} != {torch.uint8}:
            raise ValueError(f"blocks and scales are {blocks.dtype} and {scales.dtype}, not bytes")
        num_experts, num_outputs, num_groups, _ = blocks.shape
        return num_experts, num_groups * 2 * E2M1_BYTES, num_outputs


class Floats(Quantization):
    """Not quantized, but of another dtype than is asked for, or with a config that transformers
    takes for quantized: `weight`."""

    parts = ("weight",)

    def weight(self, parts: Parts) -> Tensor:
        """Returns the weight, [O, I] of any float dtype, as it is."""
        return parts["weight"]


def e2m1_pairs() -> Tensor:
    """Returns the two numbers that each byte holds, float32 [256, 2]."""
    values = [*E2M1, *(-value for value in E2M1)]
    return torch.tensor([[low, high] for high in values for low in values])


def e8m0_powers() -> Tensor:
    """Returns what each byte means as a scale, float32 [256]."""
    return torch.tensor([*(2.0 ** (power - E8M0_BIAS) for power in range(255)), nan])


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Returns the numbers, int32 [R, C * P] and not negative, of packed words, int32 [R, C]."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    numbers = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return numbers.flatten(1)


def _words(numbers: range, bits: int) -> slice:
    """The words of some numbers, of which the first begins one."""
    return slice(numbers.start * bits // WORD_BITS, -(-numbers.stop * bits // WORD_BITS))


def _for_outputs(scale: Tensor, num_outputs: int) -> Tensor:
    """A scale for the whole, or for each output or group of it, as [O, G]."""
    return (scale if scale.dim() > 1 else scale.view(-1, 1)).expand(num_outputs, -1)


def _spread(values: Tensor, shape: torch.Size, group_of_input: Tensor | None) -> Tensor:
    """One value of a tensor, row or group for each number: [O, I] of [], [1], [O] or [O, G]."""
    if group_of_input is not None and (group_of_input >= 0).all():
        return values[:, group_of_input.long()]
    if values.dim() < 2:
        return values.view(-1, 1).expand(shape)
    return values.repeat_interleave(shape[1] // values.shape[1], 1)
