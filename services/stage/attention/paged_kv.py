"""Paged KV and the description of a packed micro-batch. Owns their memory layout; knows no model.

Keys lie in the backend's own order, values token by token.

Letters of shapes: T packed rows, S sequences of the micro-batch, W blocks of its longest sequence,
H query heads, Hk KV heads, D the head size of queries and keys, Dv that of values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from shardline.base.errors import ProtocolError
from shardline.base.rounding import round_up
from shardline_scheduler.kv_blocks import BLOCK_TOKENS, blocks_for
from shardline_scheduler.step_plan import NO_STATE

VECTOR_WIDTH = 16
"""Head sizes of stored values are padded to a multiple of this: a vector load never reads past a
token's slot."""

NO_SEQUENCE = -1
NO_BLOCK = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Adjacent rows of one sequence: `length` tokens from position `start`. `blocks` hold its KV,
    in order; `state` is the slot of what its recurrent layers keep."""

    start: int
    length: int
    blocks: Sequence[int]
    state: int = NO_STATE


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One packed micro-batch of T rows. Padding rows come last, belong to no sequence (-1) and
    write no KV."""

    sequence: Tensor
    """int32 [T]: row of `table` for each packed row; rows of one sequence are adjacent and in order
    of position."""
    position: Tensor
    """int32 [T]: index of the row's token in its sequence."""
    table: Tensor
    """int32 [S, W]: KV block numbers of each sequence, in order; -1 where there is none."""
    spans: tuple[Span, ...]

    @classmethod
    def of(
        cls, spans: Sequence[Span], *, min_rows: int = 1, device: torch.device | str = "cpu"
    ) -> MicroBatch:
        """Packs spans in their order and pads them to `min_rows` rows."""
        sequence: list[int] = []
        position: list[int] = []
        width = max((blocks_for(span.start + span.length) for span in spans), default=1)
        table: list[list[int]] = []
        for index, span in enumerate(spans):
            num_blocks = blocks_for(span.start + span.length)
            assert span.start >= 0, f"span {index} starts at {span.start}"
            assert span.length > 0, f"span {index} is empty"
            assert len(span.blocks) >= num_blocks, (
                f"span {index} needs {num_blocks} KV blocks, has {len(span.blocks)}"
            )
            sequence += [index] * span.length
            position += range(span.start, span.start + span.length)
            table.append([*span.blocks[:num_blocks], *[NO_BLOCK] * (width - num_blocks)])
        num_padding = max(0, min_rows - len(sequence))

        def on_device(values: list[int] | list[list[int]]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32).to(device, non_blocking=True)

        return cls(
            sequence=on_device(sequence + [NO_SEQUENCE] * num_padding),
            position=on_device(position + [0] * num_padding),
            table=on_device(table or [[NO_BLOCK]]),
            spans=tuple(spans),
        )

    @property
    def num_rows(self) -> int:
        """The number of packed rows, padding included."""
        return self.sequence.shape[0]

    def check_blocks(self, num_blocks: int) -> None:
        """Raises ProtocolError if a span's KV lies outside a pool of this many blocks.

        Backends with kernels that check nothing need this: torch would wrap a negative index
        around, and an index past the end makes a CUDA device unusable.
        """
        for span in self.spans:
            if min(span.blocks) < 0 or max(span.blocks) >= num_blocks:
                raise ProtocolError(
                    f"a block table {tuple(span.blocks)} lies outside {num_blocks} KV blocks"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """The keys and values that one layer keeps per token. Values may have another head size than
    keys."""

    num_kv_heads: int
    head_dim: int
    value_head_dim: int | None = None

    @property
    def value_dim(self) -> int:
        """The head size of the values."""
        return self.head_dim if self.value_head_dim is None else self.value_head_dim

    @property
    def padded_value_dim(self) -> int:
        """The head size of the values as stored."""
        return round_up(self.value_dim, VECTOR_WIDTH)


@dataclass(frozen=True, slots=True)
class DistanceBias:
    """What is added to a score by the distance from the row to the key, for each head."""

    table: Tensor
    """float32 [H, 2 * reach + 16], dense: by distances from -reach on, with zeros behind the last,
    so that a vector load stays within."""
    reach: int
    """The largest distance."""

    @classmethod
    def of(cls, biases: Tensor) -> DistanceBias:
        """Takes float32 [H, 2 * reach + 1], by distances from -reach to reach."""
        table = functional.pad(biases, (0, VECTOR_WIDTH - 1)).contiguous()
        return cls(table, biases.shape[1] // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParams:
    """How one layer turns scores into weights."""

    scale: float
    window: int | None = None
    """A row sees this many keys, its own included; None: all up to its own."""
    chunk: int | None = None
    """A row sees its chunk's keys up to its own, without a window: position p is in chunk p //
    chunk. None: there are no chunks."""
    both_ways: bool = False
    """A row sees the keys behind its own too, of a sequence with all its rows in the micro-batch; a
    window goes both ways."""
    softcap: float | None = None
    sinks: Tensor | None = None
    """[H], any float dtype: a score per query head that takes part in the softmax and has no
    value."""
    distance_bias: DistanceBias | None = None
    """Without a window only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedQkv:
    """One layer's new rows: query [1, H, T, D], key [1, Hk, T, D], value [1, Hk, T, Dv], in any
    dtype and strides."""

    query: Tensor
    key: Tensor
    value: Tensor


class Backend(Protocol):
    """Computes attention over a stage's KV. Called by one thread."""

    def bind(self, kv: PagedKv) -> None:
        """Makes `kv` the storage that rows are written to and read from."""

    def use(self, micro_batch: MicroBatch) -> None:
        """Sets the rows of the next forward. May raise ProtocolError for rows that point outside
        the KV."""

    def attend(self, layer: int, qkv: PackedQkv, params: AttentionParams) -> Tensor:
        """Writes one layer's new keys and values, then attends: returns [1, T, H, Dv] in the
        query's dtype.

        Raises ProtocolError for rows that point outside the KV, unless `use` did.
        """

    def write(self, layer: int, qkv: PackedQkv, params: AttentionParams) -> None:
        """Writes one layer's new keys and values only."""


class PagedKv:
    """The KV of one stage: `keys` and `values` of each layer, allocated and touched once, so that
    memory never runs out later. Both hold [blocks, Hk, 64, ...] in `dtype`; keys end in D, values
    in Dv padded to a vector."""

    __slots__ = ("dtype", "keys", "num_blocks", "shapes", "values")

    def __init__(
        self,
        *,
        layers: Mapping[int, KvShape],
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
            slots = (num_blocks, shape.num_kv_heads, BLOCK_TOKENS)
            self.keys[layer] = torch.zeros(*slots, shape.head_dim, dtype=dtype, device=device)
            self.values[layer] = torch.zeros(
                *slots, shape.padded_value_dim, dtype=dtype, device=device
            )

    @staticmethod
    def bytes_per_block(layers: Mapping[int, KvShape], dtype: torch.dtype) -> int:
        """Returns the memory that one KV block takes over all these layers."""
        per_token = sum(
            shape.num_kv_heads * (shape.head_dim + shape.padded_value_dim)
            for shape in layers.values()
        )
        return BLOCK_TOKENS * per_token * dtype.itemsize
