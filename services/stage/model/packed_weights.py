"""The numbers of packed weights in safetensors (GPTQ, AWQ, compressed-tensors) as the kernels
compute with them: 4 bits with scales and zero points as they lie, 8 bits with scales.

Where the groups of a layer's inputs are not in order (`desc_act`, `actorder`), its inputs are
sorted by them. Knows no format of words.

Letters of shapes: O outputs, I inputs of a linear layer, G groups of `GROUP` inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from services.stage.model.config_files import quantization_of
from services.stage.model.float_files import LAYER
from services.stage.model.model_info import ModelInfo
from services.stage.model.quantization import (
    WORD_BITS,
    Grid,
    PackedQuantization,
    Parts,
    Sizes,
)
from services.stage.model.refusal import refuse
from services.stage.model.weights import COPY_AGAIN, WeightFile, check_file, weight_files
from services.stage.products.groups import (
    GROUP,
    INT4_BYTES,
    INT8_BYTES,
    Groups,
    Int8Groups,
    rounded,
    scaled,
    zero_pointed,
)

log = structlog.get_logger(__name__)

CHUNK_NUMBERS = 1 << 22
"""Unpacked at a time: int32 numbers of 16 MiB, with about another 16 MiB of buffers."""
BROKEN = (SafetensorError, KeyError, RuntimeError, ValueError, IndexError)
"""Errors raised by tensors that do not belong together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPacked:
    """Some outputs of a packed weight [O, I]."""

    quantization: PackedQuantization
    files: Mapping[str, tuple[Path, str]]
    """Where each part lies: a file, and its name there."""
    sizes: Sizes
    """Of the whole layer."""
    outputs: range
    order: Tensor | None
    """int32 [I], ascending by group; None: they are so."""
    has_whole_groups: bool
    """Each `GROUP` inputs in this order have one scale."""

    @property
    def shape(self) -> tuple[int, int]:
        """O and I."""
        return len(self.outputs), self.sizes.num_inputs

    @property
    def num_bytes(self) -> int:
        """What its groups take, and their order."""
        of_weight = INT4_BYTES if self.sizes.bits == 4 else INT8_BYTES
        of_order = 0 if self.order is None else self.order.nbytes
        return round(len(self.outputs) * self.sizes.num_inputs * of_weight) + of_order

    def rows(self, share: range) -> StoredPacked:
        """Returns these of the outputs."""
        return replace(self, outputs=self.outputs[share.start : share.stop])

    def groups(self) -> Groups:
        """Reads the numbers, [O, I]. Raises Invalid for a broken checkpoint."""
        with ExitStack() as stack:
            try:
                parts = {
                    part: stack.enter_context(safe_open(file, framework="pt")).get_tensor(name)
                    for part, (file, name) in self.files.items()
                }
                found = [self._groups(grid) for grid in self._grids(parts)]
            except BROKEN as error:
                layer, _, _ = next(iter(self.files.values()))[1].rpartition(".")
                refuse(f"{layer} cannot be unpacked: {error}", COPY_AGAIN, error)
        fields = [torch.cat(each) for each in zip(*found, strict=True)]
        return type(found[0])(*fields)

    def _grids(self, parts: Parts) -> Iterator[Grid]:
        """Some outputs at a time."""
        at_once = max(1, CHUNK_NUMBERS // self.sizes.num_inputs)
        for first in range(self.outputs.start, self.outputs.stop, at_once):
            stop = min(first + at_once, self.outputs.stop)
            begin = first // WORD_BITS * WORD_BITS  # with a word, of any number of bits
            some = self.quantization.rows(parts, self.sizes, range(begin, stop))
            grid = self.quantization.grid(some, self.sizes._replace(num_outputs=stop - begin))
            numbers, zeros, scales = (
                each[first - begin :] for each in (grid.numbers, grid.zeros, grid.scales)
            )
            yield Grid(grid.bits, numbers, zeros, scales, grid.groups)

    def _groups(self, grid: Grid) -> Groups:
        if not self.has_whole_groups:
            return rounded(grid.floats())
        inputs = slice(None) if self.order is None else self.order.long()
        of_groups = grid.groups[inputs][::GROUP]
        numbers = grid.numbers[:, inputs]
        zeros, scales = grid.zeros[:, of_groups], grid.scales[:, of_groups]
        if grid.bits == 4:
            return zero_pointed(numbers.to(torch.uint8), scales, zeros)
        middle = 1 << (grid.bits - 1)
        own = scaled((numbers - middle).to(torch.int8), scales)
        is_symmetric = (zeros == middle).all(1)
        if is_symmetric.all():
            return own
        # By output: a rank that has some of them finds what one process does.
        others = rounded(grid.floats()[:, inputs])
        keeps = (is_symmetric[:, None], is_symmetric[:, None], is_symmetric)
        pairs = zip(keeps, own, others, strict=True)
        return Int8Groups(*(torch.where(*each) for each in pairs))


def packed_weights(
    info: ModelInfo, skeleton: Callable[[], nn.Module]
) -> Mapping[str, StoredPacked]:
    """Returns the weights of layers in a checkpoint that are computed as they lie, by their names
    in the model, which `skeleton` builds without values; none if it is not packed. The others are
    named in the log. Raises Invalid for a broken checkpoint."""
    quantization = quantization_of(info.config)
    if not isinstance(quantization, PackedQuantization):
        return {}
    files = {name: file for path in weight_files(info.path) for name, file in _tensors(path)}
    found: dict[str, StoredPacked] = {}
    refused: Counter[str] = Counter()
    for name, module in skeleton().named_modules():
        is_packed = f"{name}.{quantization.parts[0]}" in files
        if type(module) is not nn.Linear or not is_packed or not LAYER.search(f".{name}."):
            continue
        try:
            stored = _stored(name, quantization, files)
        except BROKEN as error:
            refuse(f"{name} of {info.path} cannot be unpacked: {error}", COPY_AGAIN, error)
        if isinstance(stored, str):
            refused[stored] += 1
        elif stored.shape == module.weight.shape:
            found[f"{name}.weight"] = stored
    if not (found or refused):
        refused["their names in the files are not those of the model"] = len(
            [name for name in files if name.endswith(f".{quantization.parts[0]}")]
        )
    for reason, num in refused.items():
        log.warning("packed weights become floats and are fitted again", reason=reason, layers=num)
    return found


def _stored(
    layer: str, quantization: PackedQuantization, files: Mapping[str, WeightFile]
) -> StoredPacked | str:
    """One layer's, or why it has none."""
    places = {
        part: (files[name].path, name)
        for part in quantization.parts
        if (name := f"{layer}.{part}") in files
    }
    parts = {part: _described(files[name], name) for part, (_, name) in places.items()}
    sizes = quantization.sizes(parts)
    if sizes.num_inputs % GROUP:
        return f"{sizes.num_inputs} inputs are no multiple of {GROUP}"
    groups = quantization.groups(
        parts, sizes, next((part for part in parts if part.endswith("g_idx")), "")
    )
    order = torch.argsort(groups, stable=True)
    blocks = groups[order].unflatten(0, (-1, GROUP))
    is_whole = bool((blocks == blocks[:, :1]).all())
    if not is_whole and sizes.bits == 4:
        return f"groups that are no multiple of {GROUP} inputs"
    is_sorted = torch.equal(order, torch.arange(len(order)))
    return StoredPacked(
        quantization=quantization,
        files=places,
        sizes=sizes,
        outputs=range(sizes.num_outputs),
        order=None if is_sorted or not is_whole else order.int(),
        has_whole_groups=is_whole,
    )


def _tensors(path: Path) -> Iterator[tuple[str, WeightFile]]:
    file = check_file(path)
    yield from ((name, file) for name in file.tensors)


def _described(file: WeightFile, name: str) -> Tensor:
    """A tensor: its values where it is a vector, else its shape alone."""
    shape: list[Any] = file.tensors[name]["shape"]
    if len(shape) > 1:
        return torch.empty(shape, device="meta")
    with safe_open(file.path, framework="pt") as opened:
        found: Tensor = opened.get_tensor(name)
    return found
