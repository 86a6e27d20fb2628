"""Quantized checkpoints: which tensors make one weight, and its float values. Knows no file and no
shard.

A packed word has 32 bits, its first number in the lowest ones. Letters of shapes: O outputs, I
inputs of a linear layer, G groups of inputs that share a scale, P numbers in a word.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from services.stage.model.refusal import refuse

REMEDY = "Give the float checkpoint, or one in compressed-tensors, GPTQ, AWQ or fp8"
WORD_BITS = 32
BITS = (4, 8)
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where a word of AWQ holds the number of each output."""


class Quantization(ABC):
    """A format of packed weights."""

    parts: ClassVar[tuple[str, ...]]
    """Names behind the name of a linear layer: the first one tells that it is quantized."""

    @abstractmethod
    def weight(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Returns the weight [O, I] in float32. `parts` are those of one linear layer that the
        checkpoint has."""


class Gptq(Quantization):
    """Inputs packed along rows: `qweight` int32 [I/P, O], `qzeros` int32 [G, O/P], `scales` [G, O],
    `g_idx` [I]."""

    parts = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, *, zeros_are_less: int) -> None:
        """Takes how much less than meant the zero points are that the files hold."""
        self._zeros_are_less = zeros_are_less

    def weight(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Returns the weight [O, I] in float32."""
        bits = self._bits_of(parts)
        numbers = unpacked(parts["qweight"].T, bits).T
        zeros = (
            unpacked(parts["qzeros"], bits)[:, : parts["scales"].shape[1]] + self._zeros_are_less
        )
        num_inputs = len(numbers)
        scales = parts["scales"].float()
        group = parts.get("g_idx", torch.arange(num_inputs) // (num_inputs // len(scales))).long()
        return ((numbers - zeros[group]) * scales[group]).T

    def _bits_of(self, parts: Mapping[str, Tensor]) -> int:
        """Those of this layer, by its shapes: `dynamic` in the config may give some layers others
        than the model's."""
        num_outputs = parts["scales"].shape[1]
        words = parts["qzeros"].shape[1]
        found = [bits for bits in BITS if -(-num_outputs * bits // WORD_BITS) == words]
        if not found:
            refuse(
                f"zero points of {num_outputs} outputs in {words} words "
                "are of neither 4 nor 8 bits",
                REMEDY,
            )
        return found[0]


class Awq(Quantization):
    """Outputs packed along columns: `qweight` int32 [I, O/P], `qzeros` int32 [G, O/P], `scales` [G,
    O]."""

    parts = ("qweight", "qzeros", "scales")

    def weight(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Returns the weight [O, I] in float32."""
        numbers = self._unpacked(parts["qweight"])
        zeros = self._unpacked(parts["qzeros"])
        size = len(numbers) // len(zeros)
        scales = parts["scales"].float().repeat_interleave(size, 0)
        return ((numbers - zeros.repeat_interleave(size, 0)) * scales).T

    @staticmethod
    def _unpacked(words: Tensor) -> Tensor:
        numbers = unpacked(words, 4).view(len(words), -1, len(AWQ_PLACES))
        return numbers[:, :, list(AWQ_PLACES)].reshape(len(words), -1)


class PackedIntegers(Quantization):
    """Reads compressed-tensors: `weight_packed` int32 [O, I/P], `weight_scale` [O, G],
    `weight_zero_point` int32 [O/P, G], `weight_g_idx` [I]."""

    parts = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape")

    def weight(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Returns the weight [O, I] in float32."""
        words = parts["weight_packed"]
        scale = parts["weight_scale"].float()
        num_outputs, num_inputs = (int(size) for size in parts["weight_shape"])
        bits = next(
            (bits for bits in BITS if -(-num_inputs * bits // WORD_BITS) == words.shape[1]), None
        )
        if bits is None:
            refuse(
                f"weights of {num_inputs} inputs in {words.shape[1]} words "
                "are of neither 4 nor 8 bits",
                REMEDY,
            )
        offset = 1 << (bits - 1)
        numbers = unpacked(words, bits)[:, :num_inputs] - offset
        if "weight_zero_point" in parts:
            zeros = unpacked(parts["weight_zero_point"].T, bits).T[:num_outputs] - offset
            numbers = numbers - _spread(zeros, numbers.shape, parts.get("weight_g_idx"))
        return numbers * _spread(scale, numbers.shape, parts.get("weight_g_idx"))


class ScaledQuantization(Quantization):
    """Numbers of one byte, int8 or fp8, [O, I], with a scale for the whole, for each row, group or
    block."""

    parts = ("weight", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_scale_inv")

    def __init__(self, block: tuple[int, int] | None = None) -> None:
        """Takes the outputs and inputs of a block that has one scale."""
        self._block = block

    def weight(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Returns the weight [O, I] in float32; one without a scale is not quantized."""
        numbers = parts["weight"].float()
        scale = parts.get("weight_scale", parts.get("weight_scale_inv"))
        if scale is None:
            return numbers
        if "weight_zero_point" in parts:
            zeros = parts["weight_zero_point"].float()
            numbers = numbers - _spread(zeros, numbers.shape, parts.get("weight_g_idx"))
        if self._block is not None:
            rows, columns = self._block
            blocks = scale.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
            return numbers * blocks[: numbers.shape[0], : numbers.shape[1]]
        return numbers * _spread(scale.float(), numbers.shape, parts.get("weight_g_idx"))


class Floats(Quantization):
    """Not quantized, but of another dtype than is asked for: `weight`."""

    parts = ("weight",)

    def weight(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Returns the weight, [O, I] of any float dtype, as it is."""
        return parts["weight"]


METHODS = ("awq", "compressed-tensors", "fp8", "gptq")
SCALED = ("int-quantized", "naive-quantized", "float-quantized")
"""Formats of compressed-tensors."""


def quantization_of(config: Any) -> Quantization | None:
    """Returns how a model's weights are quantized; None if they are not. Raises Invalid for what is
    not read here."""
    found = getattr(config, "quantization_config", None)
    if not found:
        return None
    said: dict[str, Any] = found if isinstance(found, dict) else found.to_dict()
    method = str(said.get("quant_method")).lower()
    if method not in METHODS:
        refuse(f"it is quantized by {method}", REMEDY)
    if method == "gptq":
        _known("bits", said.get("bits"), BITS)
        is_second = said.get("checkpoint_format") == "gptq_v2"
        _known("checkpoint_format", said.get("checkpoint_format") or "gptq", ("gptq", "gptq_v2"))
        return Gptq(zeros_are_less=0 if is_second else 1)
    if method == "awq":
        _known("bits", said.get("bits", said.get("w_bit")), (4,))
        _known("version", str(said.get("version") or "gemm").lower(), ("gemm",))
        return Awq()
    if method == "fp8":
        return ScaledQuantization(_block(said.get("weight_block_size")))
    name = _known("format", said.get("format"), (*SCALED, "pack-quantized"))
    if name not in SCALED:
        return PackedIntegers()
    groups = [group.get("weights") or {} for group in (said.get("config_groups") or {}).values()]
    return ScaledQuantization(
        next(
            (_block(group["block_structure"]) for group in groups if group.get("block_structure")),
            None,
        )
    )


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Returns the numbers, int32 [R, C * P] and not negative, of packed words, int32 [R, C]."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    numbers = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return numbers.flatten(1)


def _spread(values: Tensor, shape: torch.Size, group_of_input: Tensor | None) -> Tensor:
    """One value of a tensor, row or group for each number: [O, I] of [], [1], [O] or [O, G]."""
    if group_of_input is not None and (group_of_input >= 0).all():
        return values[:, group_of_input.long()]
    if values.dim() < 2:
        return values.view(-1, 1).expand(shape)
    return values.repeat_interleave(shape[1] // values.shape[1], 1)


def _block(size: Any) -> tuple[int, int] | None:
    return (int(size[0]), int(size[1])) if size else None


def _known(name: str, value: Any, known: tuple[Any, ...]) -> Any:
    if value not in known:
        shown = " or ".join(map(str, known))
        refuse(f"its quantization_config has {name} {value!r}, not {shown}", REMEDY)
    return value
