"""The numbers of weights in GGUF files as the kernels compute with them: blocks of 4 bits and Q8_0
are groups as they lie, other blocks are rounded to groups of 8 bits.

Letters of shapes: R rows, K inputs of a weight, G groups of inputs, B blocks of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from services.stage.model.gguf.gguf_tensors import CHUNK_NUMBERS, GgufTensors
from services.stage.products.groups import (
    INT4_BYTES,
    INT8_BYTES,
    Groups,
    Int8Groups,
    gridded,
    rounded,
    scaled,
)
from shardline_gguf import IN_4_BITS

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def stored_weights(files: Sequence[Path], config: Any) -> Mapping[str, StoredGguf]:
    """Returns the weights in blocks of a model by their names in it, but for experts. Nothing is
    read before it is used. Raises Invalid for a file that cannot be read."""
    tensors = GgufTensors(files, config)
    return {
        target: StoredGguf(tensors, name, tensors.rows(name))
        for name, target in tensors.matrices_in_blocks()
    }


@dataclass(frozen=True, slots=True)
class StoredGguf:
    """Some rows of a weight [R, K] in blocks."""

    _tensors: GgufTensors
    _name: str
    _rows: Tensor
    """int64 [R], in the file."""

    @property
    def shape(self) -> tuple[int, int]:
        """R and K."""
        return len(self._rows), self._tensors.blocks(self._name)[0].shape[-1]

    @property
    def order(self) -> Tensor | None:
        """Which input stands at each place of `groups`, int32 [K]; None: each at its own."""
        return self._tensors.order(self._name)

    @property
    def num_bytes(self) -> int:
        """What its groups take."""
        place, _ = self._tensors.blocks(self._name)
        of_weight = INT4_BYTES if place.block.name in IN_4_BITS else INT8_BYTES
        return round(len(self._rows) * place.shape[-1] * of_weight)

    def groups(self) -> Groups:
        """Reads the numbers of the rows, [R, K]."""
        place, blocks = self._tensors.blocks(self._name)
        parts = [
            _groups(np.array(blocks[rows.numpy()]), place.block.name, place.type)
            for rows in self._rows.split(max(1, CHUNK_NUMBERS // place.shape[-1]))
        ]
        return type(parts[0])(*map(torch.cat, zip(*parts, strict=True)))

    def rows(self, share: range) -> StoredGguf:
        """Returns these of the rows."""
        return replace(self, _rows=self._rows[share.start : share.stop])


def _groups(rows: Bytes, block: str, kind: int) -> Groups:
    """Those of raw rows, uint8 [R, bytes of a row]."""
    if block in IN_4_BITS:
        return gridded(*map(torch.from_numpy, GRIDS[block](rows)))
    if block == "Q8_0":
        return _q8_0(rows)
    floats = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(kind))
    return rounded(torch.from_numpy(floats).view(len(rows), -1))


def _q4_0(rows: Bytes) -> tuple[Any, Any, Any]:
    scale, numbers = np.split(rows.reshape(len(rows), -1, 18), [2], 2)
    scales = _floats(scale)[:, :, 0]
    return _halves(numbers), scales, scales * -8


def _q4_1(rows: Bytes) -> tuple[Any, Any, Any]:
    scale, minimum, numbers = np.split(rows.reshape(len(rows), -1, 20), [2, 4], 2)
    return _halves(numbers), _floats(scale)[:, :, 0], _floats(minimum)[:, :, 0]


def _q4_k(rows: Bytes) -> tuple[Any, Any, Any]:
    """A block of 256 has 8 groups, with scales and minimums of 6 bits."""
    scale, minimum, of_groups, numbers = np.split(rows.reshape(-1, 144), [2, 4, 16], 1)
    scales, minimums = gguf.quants.Q4_K.get_scale_min(of_groups)
    each = (_floats(scale) * scales, -_floats(minimum) * minimums)
    of_rows = (values.reshape(len(rows), -1).astype(np.float32) for values in each)
    return _halves(numbers.reshape(len(rows), -1, 32)), *of_rows


def _q8_0(rows: Bytes) -> Int8Groups:
    scale, numbers = np.split(rows.reshape(len(rows), -1, 34), [2], 2)
    integers = torch.from_numpy(numbers.view(np.int8).reshape(len(rows), -1))
    return scaled(integers, torch.from_numpy(_floats(scale)[:, :, 0]))


GRIDS: Mapping[str, Callable[[Bytes], tuple[Any, Any, Any]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
}
"""Give numbers uint8 [R, K], scales and minimums float32 [R, G] of raw rows, by names of blocks."""


def _halves(numbers: Bytes) -> Bytes:
    """Numbers [R, K] of bytes [R, B, n]: of each block first all low halves, then the high ones."""
    return np.concatenate([numbers & 15, numbers >> 4], 2).reshape(len(numbers), -1)


def _floats(halves: Bytes) -> Any:
    """float32 [..., n / 2] of half precision in bytes [..., n]."""
    return np.ascontiguousarray(halves).view(np.float16).astype(np.float32)
