"""Quantized checkpoints for tests, and the float checkpoints that mean the same: packed number by
number."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from tests.models import save_model

GROUP = 16
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The outputs whose numbers a word of AWQ holds, from its lowest bits."""
FILE = "model.safetensors"


class Packed(NamedTuple):
    """What a linear layer [O, I] becomes in a checkpoint, and the weight that this means."""

    tensors: dict[str, Tensor]
    weight: Tensor


Pack = Callable[[torch.Size, torch.Generator], Packed]


def save_both(
    folder: Path, pack: Pack, config: dict[str, Any], model: str = "llama", **sizes: Any
) -> tuple[Path, Path]:
    """Saves a model with packed linear layers and the same one with float weights; returns their
    folders."""
    whole = save_model(folder / "float", model, **sizes)
    tensors = load_file(whole / FILE)
    generator = torch.Generator().manual_seed(3)
    packed: dict[str, Tensor] = {}
    for name, tensor in list(tensors.items()):
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in PROJECTIONS:
            made = pack(tensor.shape, generator)
            tensors[name] = made.weight.contiguous()
            packed |= {
                f"{layer}.{part}": value.contiguous() for part, value in made.tensors.items()
            }
        else:
            packed[name] = tensor
    save_file(tensors, whole / FILE, metadata={"format": "pt"})
    other = folder / "packed"
    shutil.copytree(whole, other)
    save_file(packed, other / FILE, metadata={"format": "pt"})
    file = other / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": config}))
    return whole, other


def rows_in_words(numbers: Tensor, bits: int) -> Tensor:
    """Packs the numbers of each row into words of 32 bits, the first in the lowest ones."""
    size = 32 // bits
    whole = functional.pad(numbers.long(), (0, -numbers.shape[1] % size)).unflatten(1, (-1, size))
    words = sum(whole[..., place] * (1 << bits * place) for place in range(size))
    return (words - (words >= 1 << 31) * (1 << 32)).int()


def integers(generator: torch.Generator, bits: int, *shape: int) -> Tensor:
    return torch.randint(1 << bits, shape, generator=generator)


def scales_of(generator: torch.Generator, *shape: int, bits: int = 4) -> Tensor:
    """Such that weights are about as large as those of the other tests."""
    return (torch.rand(shape, generator=generator) + 0.5).half() / (1 << bits)


def gptq(
    bits: int = 4,
    *,
    less: int = 1,
    reordered: bool = False,
    alike: bool = False,
    group: int | None = GROUP,
    symmetric: bool = False,
    borrows: bool = False,
) -> Pack:
    """Zero points are stored this much less than meant, by whole words: with `borrows` some are
    0; `reordered` gives each layer another order
    of inputs, `alike` those of as many inputs one."""

    def pack(shape: torch.Size, generator: torch.Generator) -> Packed:
        outputs, inputs = shape
        numbers = integers(generator, bits, inputs, outputs)
        size = group or inputs
        scales = scales_of(generator, inputs // size, outputs, bits=bits)
        zeros = torch.randint(0 if borrows else 1, 1 << bits, scales.shape, generator=generator)
        if borrows:
            zeros[:, ::3] = 0
        if symmetric:
            zeros[:] = 1 << (bits - 1)
        groups = torch.arange(inputs) // size
        if reordered or alike:
            order = torch.Generator().manual_seed(inputs) if alike else generator
            groups = groups[torch.randperm(inputs, generator=order)]
        weight = torch.stack(
            [scales[g].float() * (numbers[i] - zeros[g]) for i, g in enumerate(groups.tolist())]
        )
        tensors = {
            "qweight": rows_in_words(numbers.T, bits).T,
            "qzeros": rows_in_words(zeros, bits) - sum(less << at for at in range(0, 32, bits)),
            "scales": scales,
            "g_idx": groups.int(),
        }
        return Packed(tensors, weight.T)

    return pack


def gptq_dynamic(shape: torch.Size, generator: torch.Generator) -> Packed:
    """8 bits in layers with more inputs than outputs, as `dynamic` gives them to down_proj."""
    return gptq(8 if shape[0] < shape[1] else 4)(shape, generator)


def awq(group: int | None = GROUP) -> Pack:
    """`group` None: a scale for each output."""

    def pack(shape: torch.Size, generator: torch.Generator) -> Packed:
        outputs, inputs = shape
        size = group or inputs
        numbers = integers(generator, 4, inputs, outputs)
        scales = scales_of(generator, inputs // size, outputs)
        zeros = integers(generator, 4, *scales.shape)
        weight = torch.stack(
            [scales[i // size].float() * (numbers[i] - zeros[i // size]) for i in range(inputs)]
        )
        order = [first + place for first in range(0, outputs, 8) for place in AWQ_ORDER]
        tensors = {
            "qweight": rows_in_words(numbers[:, order], 4),
            "qzeros": rows_in_words(zeros[:, order], 4),
            "scales": scales,
        }
        return Packed(tensors, weight.T)

    return pack


def packed_integers(
    bits: int, *, group: int | None, symmetric: bool, reordered: bool = False
) -> Pack:
    """Of compressed-tensors; `group` None: a scale for each row."""

    def pack(shape: torch.Size, generator: torch.Generator) -> Packed:
        outputs, inputs = shape
        offset = 1 << (bits - 1)
        size = group or inputs
        numbers = integers(generator, bits, *shape) - offset
        scales = scales_of(generator, outputs, inputs // size, bits=bits)
        zeros = (
            torch.zeros(scales.shape, dtype=torch.long)
            if symmetric
            else integers(generator, bits, *scales.shape) - offset
        )
        groups = torch.arange(inputs) // size
        if reordered:
            groups = groups[torch.randperm(inputs, generator=generator)]
        columns = [
            scales[:, g].float() * (numbers[:, i] - zeros[:, g])
            for i, g in enumerate(groups.tolist())
        ]
        tensors = {
            "weight_packed": rows_in_words(numbers + offset, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(shape),
        }
        if reordered:
            tensors["weight_g_idx"] = groups.int()
        if not symmetric:
            tensors["weight_zero_point"] = rows_in_words((zeros + offset).T, bits).T
        return Packed(tensors, torch.stack(columns, 1))

    return pack


def int8_rows(shape: torch.Size, generator: torch.Generator) -> Packed:
    numbers = integers(generator, 8, *shape) - 128
    scales = scales_of(generator, shape[0], 1, bits=8)
    return Packed(
        {"weight": numbers.to(torch.int8), "weight_scale": scales}, numbers * scales.float()
    )


def plain(shape: torch.Size, generator: torch.Generator) -> Packed:
    weight = torch.randn(shape, generator=generator)
    return Packed({"weight": weight}, weight)


def fp8(block: int | None, scale: str = "weight_scale_inv") -> Pack:
    """With a scale for each row, or for each square block, of this name."""

    def pack(shape: torch.Size, generator: torch.Generator) -> Packed:
        numbers = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
        if block is None:
            scales = scales_of(generator, shape[0], 1, bits=1).float()
            return Packed({"weight": numbers, "weight_scale": scales}, numbers.float() * scales)
        scales = scales_of(generator, *(-(-size // block) for size in shape), bits=1).float()
        weight = torch.tensor(
            [
                [
                    float(numbers[o, i]) * float(scales[o // block, i // block])
                    for i in range(shape[1])
                ]
                for o in range(shape[0])
            ]
        )
        return Packed({"weight": numbers, scale: scales}, weight)

    return pack
