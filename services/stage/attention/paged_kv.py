"""Paged KV and the description of a packed micro-batch. Owns their memory layout; knows no model.

Keys lie in the kernel's order, values token by token; both backends read the same storage, each in its own view.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from services.stage.scheduling.kv_blocks import BLOCK_TOKENS, blocks_for
from shardline.rounding import round_up

LANES = 16
"""Head sizes of stored values are padded to this, so that a vector register never reads past a token's place."""

NO_SEQUENCE = -1
NO_BLOCK = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Adjacent rows of one sequence: `length` tokens from position `start`; `blocks` hold its KV, in order."""

    start: int
    length: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One packed micro-batch of T rows. Padding rows come last, belong to no sequence (-1) and write no KV."""

    sequence: Tensor
    """int32 [T]: row of `table` for each packed row; rows of one sequence are adjacent and in order of position."""
    position: Tensor
    """int32 [T]: place of the row's token in its sequence."""
    table: Tensor
    """int32 [S, W]: KV block numbers of each sequence, in order; -1 where there is none."""
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, spans: Sequence[Span], *, min_rows: int = 1, device: torch.device | str = "cpu") -> MicroBatch:
        """Packs spans in their order and pads to `min_rows`."""
        sequence: list[int] = []
        position: list[int] = []
        width = max((blocks_for(span.start + span.length) for span in spans), default=1)
        table: list[list[int]] = []
        for index, span in enumerate(spans):
            num_blocks = blocks_for(span.start + span.length)
            assert span.start >= 0, f"span {index} starts at {span.start}"
            assert span.length > 0, f"span {index} is empty"
            assert len(span.blocks) >= num_blocks, f"span {index} needs {num_blocks} KV blocks, has {len(span.blocks)}"
            sequence += [index] * span.length
            position += range(span.start, span.start + span.length)
            table.append([*span.blocks[:num_blocks], *[NO_BLOCK] * (width - num_blocks)])
        num_padding = max(0, min_rows - len(sequence))

        def place(values: list[int] | list[list[int]]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32).to(device, non_blocking=True)

        return cls(
            sequence=place(sequence + [NO_SEQUENCE] * num_padding),
            position=place(position + [0] * num_padding),
            table=place(table or [[NO_BLOCK]]),
            spans=tuple(spans),
        )

    @property
    def num_rows(self) -> int:
        """Packed rows, padding included."""
        return self.sequence.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """What one layer keeps per token. Values may have another head size than keys."""

    num_kv_heads: int
    head_dim: int
    value_head_dim: int | None = None

    @property
    def value_dim(self) -> int:
        """Head size of the values."""
        return self.head_dim if self.value_head_dim is None else self.value_head_dim

    @property
    def padded_value_dim(self) -> int:
        """Head size of the values as stored."""
        return round_up(self.value_dim, LANES)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParams:
    """How one layer's scores become weights."""

    scale: float
    window: int | None = None
    """A row sees this many keys, itself included; None: all before it."""
    softcap: float | None = None
    sinks: Tensor | None = None
    """[heads]: a score per head that takes part in the softmax and has no value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedQkv:
    """One layer's new rows: query [1, H, T, D], key [1, Hk, T, D], value [1, Hk, T, Dv], in any strides."""

    query: Tensor
    key: Tensor
    value: Tensor


class Backend(Protocol):
    """Writes a layer's new keys and values, then attends: [1, T, H, Dv]."""

    def bind(self, kv: PagedKv) -> None:
        """From now on rows are written to and read from `kv`."""

    def use(self, batch: MicroBatch) -> None:
        """The next rows; raises ProtocolError where they point outside the KV."""

    def attend(self, layer: int, rows: PackedQkv, rule: AttentionParams) -> Tensor:
        """One layer. Raises ProtocolError where rows point outside the KV."""

    def write(self, layer: int, rows: PackedQkv, rule: AttentionParams) -> None:
        """Only the keys and values of one layer."""


class PagedKv:
    """KV of one stage: two tensors per layer, allocated and touched once, so that memory never runs out later."""

    __slots__ = ("dtype", "keys", "num_blocks", "shapes", "values")

    def __init__(
        self,
        *,
        layers: Mapping[int, HeadShape],
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_blocks = num_blocks
        self.dtype = dtype
        self.shapes = dict(layers)
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        for layer, shape in layers.items():
            place = (num_blocks, shape.num_kv_heads, BLOCK_TOKENS)
            self.keys[layer] = torch.zeros(*place, shape.head_dim, dtype=dtype, device=device)
            self.values[layer] = torch.zeros(*place, shape.padded_value_dim, dtype=dtype, device=device)

    @staticmethod
    def bytes_per_block(layers: Mapping[int, HeadShape], dtype: torch.dtype) -> int:
        """Memory that one KV block takes over all these layers."""
        per_token = sum(shape.num_kv_heads * (shape.head_dim + shape.padded_value_dim) for shape in layers.values())
        return BLOCK_TOKENS * per_token * dtype.itemsize
