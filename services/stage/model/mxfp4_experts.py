"""Experts in MXFP4 as the kernels compute with them: twice their numbers are integers, so groups of
8 bits hold them as they lie.

Letters of shapes: R rows, outputs of experts; K inputs, G groups of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from services.stage.model.config_files import quantization_of
from services.stage.model.float_files import LAYER
from services.stage.model.gguf.gguf_tensors import GgufTensors
from services.stage.model.model_info import ModelInfo
from services.stage.model.packed_weights import BROKEN
from services.stage.model.quantization import E2M1_BYTES, Mxfp4, e2m1_pairs, e8m0_powers
from services.stage.model.refusal import refuse
from services.stage.model.weights import COPY_AGAIN, WeightFile, check_file, weight_files
from services.stage.products.experts import is_experts, stacked_weights
from services.stage.products.groups import GROUP, INT8_BYTES, Int8Groups, scaled
from shardline_gguf import is_gguf


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredExperts:
    """Some outputs of the experts of one layer, one expert's behind another's."""

    name: str
    """In the model."""
    read: Callable[[range], tuple[Tensor, Tensor]]
    """Returns blocks, uint8 [R, G, 16], and scales, uint8 [R, G], of some outputs."""
    shape: tuple[int, ...]
    """Experts, K and the outputs of each; of some outputs R and K."""
    num_inputs: int
    outputs: range

    @property
    def order(self) -> None:
        """Every input stands at its own place."""
        return None

    @property
    def num_bytes(self) -> int:
        """What its groups take."""
        return round(len(self.outputs) * self.num_inputs * INT8_BYTES)

    def rows(self, share: range) -> StoredExperts:
        """Returns these of the outputs."""
        shape = len(share), self.num_inputs
        return replace(self, outputs=self.outputs[share.start : share.stop], shape=shape)

    def groups(self) -> Int8Groups:
        """Reads the numbers, [R, K]. Raises Invalid for a broken checkpoint."""
        try:
            return in_groups(*self.read(self.outputs))
        except BROKEN as error:
            refuse(f"{self.name} cannot be unpacked: {error}", COPY_AGAIN, error)


def in_groups(blocks: Tensor, scales: Tensor) -> Int8Groups:
    """Returns blocks, uint8 [R, G, 16], with scales, uint8 [R, G], as groups of 8 bits: exact but
    for groups 2**24 below the largest of their output, which become zeros. Raises ValueError for a
    scale that bfloat16 does not hold, as the other dtypes do."""
    # A pair of int8 has the size of an int16: one look-up finds both.
    table = (2 * e2m1_pairs()).to(torch.int8).view(torch.int16).flatten()
    numbers = table.index_select(0, blocks.int().flatten()).view(torch.int8).view(len(blocks), -1)
    steps = e8m0_powers()[scales.int()] / 2
    largest = numbers.unflatten(1, (-1, GROUP)).abs().amax(2) * steps
    if not largest.bfloat16().isfinite().all():
        raise ValueError("a scale is not finite in bfloat16")
    return scaled(numbers, steps)


def mxfp4_experts(
    info: ModelInfo, skeleton: Callable[[], nn.Module]
) -> Mapping[str, StoredExperts]:
    """Returns the stacked weights of experts in MXFP4 of a checkpoint or a GGUF file by their names
    in the model, which `skeleton` builds without values; none of another one. Raises Invalid for a
    broken checkpoint."""
    files = weight_files(info.path)
    if is_gguf(files[0]):
        published = _in_gguf(GgufTensors(files, info.config))
    elif isinstance(quantization_of(info.config), Mxfp4):
        published = _as_published(files)
    else:
        return {}
    found: dict[str, StoredExperts] = {}
    for module_name, module in skeleton().named_modules():
        if not is_experts(module) or not getattr(module, "is_transposed", False):
            continue
        for attribute, stacked in stacked_weights(module):
            name = f"{module_name}.{attribute}"
            if name in published and LAYER.search(name):
                stored = published[name]()
                if stored.shape == stacked.shape:  # else the loader refuses it
                    found[name] = stored
    return found


def _in_gguf(tensors: GgufTensors) -> Mapping[str, Callable[[], StoredExperts]]:
    return {
        name: partial(_stored_gguf, name, tensors, parts)
        for name, parts in tensors.stacks_in("MXFP4")
    }


def _stored_gguf(name: str, tensors: GgufTensors, parts: Sequence[str]) -> StoredExperts:
    num_experts, num_outputs, num_inputs = tensors.blocks(parts[0])[0].shape
    num_outputs *= len(parts)
    return StoredExperts(
        name=name,
        read=partial(_read_gguf, tensors, parts),
        shape=(num_experts, num_inputs, num_outputs),
        num_inputs=num_inputs,
        outputs=range(num_experts * num_outputs),
    )


def _read_gguf(tensors: GgufTensors, parts: Sequence[str], outputs: range) -> tuple[Tensor, Tensor]:
    """Reads some outputs, which are in turn of each part. A block has its scale before its numbers:
    those of all low halves of bytes stand before those of the high ones."""
    numbers = np.arange(outputs.start, outputs.stop)
    sources = [tensors.blocks(part)[1] for part in parts]
    found = np.empty((len(numbers), sources[0].shape[1]), dtype=np.uint8)
    for which, source in enumerate(sources):
        own = numbers % len(parts) == which
        found[own] = source[numbers[own] // len(parts)]
    content = torch.from_numpy(found).unflatten(1, (-1, 1 + E2M1_BYTES))
    halves = torch.cat((content[..., 1:] & 15, content[..., 1:] >> 4), 2)
    return halves[..., ::2] | halves[..., 1::2] << 4, content[..., 0]


def _as_published(files: Sequence[Path]) -> Mapping[str, Callable[[], StoredExperts]]:
    by_name = {name: file for file in map(check_file, files) for name in file.tensors}
    end = f"_{Mxfp4.parts[0]}"
    return {
        name.removesuffix(end): partial(_stored, name.removesuffix(end), by_name)
        for name in by_name
        if name.endswith(end)
    }


def _read(name: str, files: Sequence[Path], outputs: range) -> tuple[Tensor, Tensor]:
    some = slice(outputs.start, outputs.stop)
    names = (f"{name}_{part}" for part in Mxfp4.parts)
    with ExitStack() as stack:
        # The file is mapped: only what is sliced is read.
        parts = [
            stack.enter_context(safe_open(file, framework="pt")).get_tensor(each)
            for file, each in zip(files, names, strict=True)
        ]
        blocks, scales = (part.flatten(0, 1)[some] for part in parts)
        return blocks, scales


def _stored(name: str, files: Mapping[str, WeightFile]) -> StoredExperts:
    try:
        by_part = {part: files[f"{name}_{part}"] for part in Mxfp4.parts}
        shape = Mxfp4.shape(
            {part: _described(file, f"{name}_{part}") for part, file in by_part.items()}
        )
    except BROKEN as error:
        refuse(f"{name} cannot be unpacked: {error}", COPY_AGAIN, error)
    num_experts, num_inputs, num_outputs = shape
    return StoredExperts(
        name=name,
        read=partial(_read, name, [by_part[part].path for part in Mxfp4.parts]),
        shape=shape,
        num_inputs=num_inputs,
        outputs=range(num_experts * num_outputs),
    )


def _described(file: WeightFile, name: str) -> Tensor:
    """The shape of a tensor, and whether it has bytes."""
    tensor = file.tensors[name]
    dtype = torch.uint8 if tensor["dtype"] == "U8" else torch.float32
    return torch.empty(tensor["shape"], dtype=dtype, device="meta")
