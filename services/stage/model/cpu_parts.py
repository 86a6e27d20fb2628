"""Parts of a model that a stage on an accelerator keeps on the CPU: the embedding and the output
layer; no layer needs their weights. Knows no attention and no sampling."""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from shardline.base.errors import Invalid

FIELD = "SHARDLINE_CPU_PARTS"


class CpuPart(StrEnum):
    """What may stay."""

    EMBEDDING = "embedding"
    OUTPUT = "output"


def parse_parts(text: str) -> frozenset[CpuPart]:
    """Reads `embedding,output`. Raises Invalid for anything else."""
    names = {name.strip() for name in text.split(",")} - {""}
    if not names <= set(CpuPart):
        unknown = ", ".join(sorted(names - set(CpuPart)))
        raise Invalid(
            FIELD,
            f"{unknown!r} is no part that can stay on the CPU",
            f"Use {' or '.join(CpuPart)}, or both",
        )
    return frozenset(CpuPart(name) for name in names)


def parts_of(parts: frozenset[CpuPart], *, is_first: bool) -> frozenset[CpuPart]:
    """Returns those that matter to a shard. Behind the first one an embedding is there only as the
    output layer's tied weight, and stays with it."""
    if is_first:
        return parts
    return frozenset(CpuPart) if CpuPart.OUTPUT in parts else frozenset()


def num_bytes(model: Any, parts: Collection[CpuPart]) -> int:
    """Returns the bytes of weights that the accelerator does not hold: a tied weight of which one
    part stays is on both."""
    kept, elsewhere = _parameters(model, parts)
    return sum(
        each.numel() * each.element_size() for name, each in kept.items() if name not in elsewhere
    )


def place(model: Any, device: torch.device, parts: Collection[CpuPart]) -> None:
    """Moves a model in the host's memory to a device, but these parts; what they get and give
    crosses by itself."""
    _, elsewhere = _parameters(model, parts)
    staying = {
        part: module
        for part in parts
        if next((module := _module(model, part)).parameters(), None) is not None
    }
    for part, module in staying.items():
        if id(module.weight) in elsewhere:
            module.weight = nn.Parameter(module.weight.detach().clone(), requires_grad=False)
        _setter(model, part)(nn.Identity())
    model.to(device)
    for part, module in staying.items():
        _setter(model, part)(module)
        module.register_forward_pre_hook(_to_cpu)
        if part is CpuPart.EMBEDDING:
            module.register_forward_hook(lambda _module, _args, states: states.to(device))


def _parameters(model: Any, parts: Collection[CpuPart]) -> tuple[dict[int, Tensor], set[int]]:
    """The parameters of these parts by identity, and the identities of those of all other
    modules."""
    staying = [_module(model, part) for part in parts]
    inner = {id(each) for module in staying for each in module.modules()}
    kept = {id(each): each for module in staying for each in module.parameters()}
    others = [module for module in model.modules() if id(module) not in inner]
    return kept, {id(each) for module in others for each in module.parameters(recurse=False)}


def _module(model: Any, part: CpuPart) -> Any:
    return (
        model.get_input_embeddings() if part is CpuPart.EMBEDDING else model.get_output_embeddings()
    )


def _setter(model: Any, part: CpuPart) -> Callable[[nn.Module], None]:
    setter: Callable[[nn.Module], None]
    setter = (
        model.set_input_embeddings if part is CpuPart.EMBEDDING else model.set_output_embeddings
    )
    return setter


def _to_cpu(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(each.cpu() if isinstance(each, Tensor) else each for each in args)
