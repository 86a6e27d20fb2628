"""The tensors of a GGUF checkpoint: raw blocks from memory-mapped files, and the float weights of a
model that they mean, tensor by tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from services.stage.model.gguf.targets import Target
from services.stage.model.gguf.tensor_names import ROPES, layer_of, target_of
from shardline_gguf import GgufHeader, TensorPlace, drafting_layers, read_header, refuse

CHUNK_NUMBERS = 1 << 22
"""Dequantized at a time: float32 numbers of 16 MiB, with about another 16 MiB of buffers."""


class GgufTensors:
    """Reads weights of one model from its files, which stay open as maps."""

    def __init__(self, files: Sequence[Path], config: Any) -> None:
        """Reads the headers. Raises Invalid for a file that cannot be read, or a tensor that its
        architecture does not have."""
        headers = [read_header(file) for file in files]
        self._places: dict[str, TensorPlace] = {
            name: place for header in headers for name, place in header.tensors.items()
        }
        self._config = config
        self._targets = dict(self._named(headers[0], config.num_hidden_layers))
        self._parts = self._joined(headers[0])
        self._maps = {file: np.memmap(file, dtype=np.uint8, mode="r") for file in files}

    def by_layer(self) -> Mapping[int | None, list[str]]:
        """Returns the names of tensors by the number of their layer; None: of no layer."""
        found: dict[int | None, list[str]] = defaultdict(list)
        for name, (_, layer) in self._targets.items():
            found[layer].append(name)
        return found

    def blocks(self, name: str) -> tuple[TensorPlace, np.ndarray[Any, np.dtype[np.uint8]]]:
        """Returns where a tensor lies and its raw bytes, uint8 [rows, bytes of a row]: a view of
        the file, of which nothing is read before it is used."""
        place = self._places[name]
        row_bytes = place.shape[-1] // place.block.num_numbers * place.block.num_bytes
        content = self._maps[place.file][place.start : place.start + place.num_bytes]
        return place, content.reshape(-1, row_bytes)

    def matrices_in_blocks(self) -> Iterator[tuple[str, str]]:
        """Yields each matrix that is no float and not of experts, by its names here and in the
        model."""
        for name, (target, _) in self._targets.items():
            place = self._places[name]
            is_matrix = len(place.shape) == 2 and not target.each_expert and target.part is None
            if is_matrix and place.block.num_numbers > 1 and self._stays_one(name):
                yield name, target.name

    def stacks_in(self, block: str) -> Iterator[tuple[str, list[str]]]:
        """Yields the weights of all experts that are made of tensors [E, O, I] in blocks of this
        name, by their names in the model, with those of the tensors in order."""
        for target, names in self._parts.items():
            places = [self._places[name] for name in names]
            if all(len(each.shape) == 3 and each.block.name == block for each in places):
                yield target, names

    def rows(self, name: str) -> Tensor:
        """Returns where the rows of a matrix's weight lie in its blocks, int64 [rows]."""
        numbers = torch.arange(self._places[name].shape[0])
        undo = self._targets[name][0].undo
        return numbers if undo is None or self._moves(name) else undo(numbers, self._config)

    def order(self, name: str) -> Tensor | None:
        """Returns which of a matrix's own inputs stand at each place of its blocks, int32 [inputs];
        None where each stands at its own."""
        undo = self._targets[name][0].undo
        if undo is None or not self._moves(name):
            return None
        numbers = torch.arange(self._places[name].shape[1])
        return undo(numbers, self._config).argsort().int()

    def weights(self, name: str, dtype: torch.dtype) -> dict[str, Tensor]:
        """Returns the weights [...] that a tensor of the file means, by their names in the model,
        in `dtype`. A tensor may hold one for each expert; of several that one weight is made of
        only the first means it."""
        target, _ = self._targets[name]
        dtype = torch.float32 if target.is_single else dtype
        if target.part is None:
            weight = self._weight(name, dtype)
        elif target.part.number:
            return {}  # read with the first part
        else:
            parts = [self._weight(each, dtype) for each in self._parts[target.name]]
            weight = target.part.join(parts, self._config)
        if not target.each_expert:
            return {target.name: weight.contiguous()}
        return {target.name.format(number): each.clone() for number, each in enumerate(weight)}

    def _stays_one(self, name: str) -> bool:
        """Whether a matrix of the file is one of the model too: no norm in rows, and no
        convolution."""
        undo = self._targets[name][0].undo
        shape = self._places[name].shape
        return undo is None or undo(torch.empty(shape, device="meta"), self._config).shape == shape

    def _moves(self, name: str) -> bool:
        return self._targets[name][0].moves_inputs

    def _weight(self, name: str, dtype: torch.dtype) -> Tensor:
        undo = self._targets[name][0].undo
        if undo is None:
            return self._dequantized(name, dtype)
        # Computed in float32: a norm is near 1, and what is left without it is small.
        return undo(self._dequantized(name, torch.float32), self._config).to(dtype)

    def target(self, name: str) -> str:
        """Returns what the model names the weight of a tensor."""
        return self._targets[name][0].name

    def _dequantized(self, name: str, dtype: torch.dtype) -> Tensor:
        """Returns a tensor's numbers, a few rows at a time, so that memory holds them in float32
        only so long."""
        place, rows = self.blocks(name)
        kind = gguf.GGMLQuantizationType(place.type)
        found = torch.empty(len(rows), place.shape[-1], dtype=dtype)
        step = max(1, CHUNK_NUMBERS // place.shape[-1])
        for first in range(0, len(rows), step):
            part = np.array(rows[first : first + step])
            floats = gguf.quants.dequantize(part, kind)
            found[first : first + step] = torch.from_numpy(floats).view(len(part), -1)
        return found.view(place.shape)

    def _joined(self, header: GgufHeader) -> dict[str, list[str]]:
        """Returns the tensors that weights are joined of, in order. Raises Invalid if one is
        missing."""
        found: dict[str, dict[int, str]] = defaultdict(dict)
        counts: dict[str, int] = {}
        for name, (target, _) in self._targets.items():
            if target.part is not None:
                found[target.name][target.part.number] = name
                counts[target.name] = target.part.num_parts
        for weight, parts in found.items():
            if len(parts) < counts[weight]:
                refuse(f"{header.path} has only {min(parts.values())!r} of {weight}")
        return {weight: [parts[each] for each in sorted(parts)] for weight, parts in found.items()}

    def _named(
        self, header: GgufHeader, num_layers: int
    ) -> Iterator[tuple[str, tuple[Target, int | None]]]:
        # Layers that draft tokens ahead change none of the model's own.
        ahead = range(num_layers, num_layers + drafting_layers(header))
        for name in self._places.keys() - ROPES:
            if layer_of(name) in ahead:
                continue
            found = target_of(header.architecture, name)
            if found is None:
                refuse(
                    f"{header.path} has {name[:80]!r}, which {header.architecture} does not have "
                    "here",
                    "Give the model in safetensors",
                )
            if found[1] is not None and found[1] >= num_layers:
                refuse(f"{header.path} has {name[:80]!r} and {num_layers} layers")
            yield name, found
