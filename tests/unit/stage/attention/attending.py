"""For attention tests: sequences, a float64 reference, and a driver that feeds them to an Attention
in any chunks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from services.stage.attention.attention import Attention, KvShape, MicroBatch, PagedKv, Span
from services.stage.attention.triton_backend import TritonBackend
from services.stage.kernels.build import KernelSettings, build
from services.stage.kernels.kernel import Kernel, supported_isas
from shardline_scheduler.kv_blocks import blocks_for
from tests.unit.stage.kernels.emulation import emulated_amx

LAYER = 3
OWN_ORDER = {"amx", "avx512_bf16"}
"""Variants that sum pairs of bfloat16 in the processor's order, whose bits are their own."""


class Layer(nn.Module):
    """What an attention module shows of itself."""

    def __init__(self, layer_idx: int, attention_chunk: int | None = None) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.attention_chunk = attention_chunk


def all_kernels() -> list[Kernel]:
    """Every variant that this processor runs, and that for AMX with emulated tiles if it has
    none."""
    native = [Kernel(build(isa, KernelSettings().kernel_dir), isa) for isa in supported_isas()]
    return native if native[0].isa == "amx" else [emulated_amx(), *native]


def kernels() -> list[Kernel]:
    """Those with attention of their own: the others differ in their products only."""
    return [kernel for kernel in all_kernels() if kernel.isa in {*OWN_ORDER, "avx512", "avx2"}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Sequences of one layer; `options` are what the model passes to its attention function, and
    `attention_chunk`, which its modules have."""

    lengths: Sequence[int]
    num_kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    value_dim: int | None = None
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    both_ways: bool = False
    """Rows see later ones too: each sequence is fed whole."""
    seed: int = 0

    @property
    def layer(self) -> Layer:
        """The module that attends."""
        return Layer(LAYER, self.options.get("attention_chunk"))

    @property
    def shape(self) -> KvShape:
        """The layer's KV."""
        return KvShape(
            num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, value_head_dim=self.value_dim
        )

    def rows(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Query [H, n, D], key and value [Hk, n, D] of each sequence."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw(num_rows: int, num_heads: int, dim: int) -> Tensor:
            return (
                torch.randn(num_rows, num_heads, dim, generator=generator)
                .to(self.dtype)
                .transpose(0, 1)
            )

        num_heads = self.num_kv_heads * self.group
        num_kv_heads = self.num_kv_heads
        return [
            (
                draw(n, num_heads, self.head_dim),
                draw(n, num_kv_heads, self.head_dim),
                draw(n, num_kv_heads, self.shape.value_dim),
            )
            for n in self.lengths
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the KV lies: its device, and which blocks each sequence gets."""

    device: str = "cpu"
    shuffle: int = 7


IN_MEMORY = Place()


def bounds() -> st.SearchStrategy[dict[str, int]]:
    """Options by which rows see all keys up to their own, a window of them, or their chunk."""
    names = st.sampled_from(["sliding_window", "attention_chunk"])
    return st.one_of(
        st.just({}), st.dictionaries(names, st.integers(1, 100), min_size=1, max_size=1)
    )


def reference(case: Case) -> list[Tensor]:
    """Attention of each sequence as the textbook writes it, in float64: [n, H, D]."""
    return [_attend_in_float64(q.double(), k.double(), v.double(), case) for q, k, v in case.rows()]


def _attend_in_float64(query: Tensor, key: Tensor, value: Tensor, case: Case) -> Tensor:
    key = key.repeat_interleave(case.group, 0)
    value = value.repeat_interleave(case.group, 0)
    options = case.options
    num = query.shape[1]
    scores = query @ key.transpose(1, 2) * options.get("scaling", case.head_dim**-0.5)
    if cap := options.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    place = torch.arange(num)
    age = place[:, None] - place[None]
    if (bias := options.get("distance_bias")) is not None:
        scores = scores + bias.table[:, bias.reach - age].double()
    if case.both_ways:
        age = age.abs()
    is_hidden = (age < 0) | (age >= (options.get("sliding_window") or num))
    if chunk := options.get("attention_chunk"):
        is_hidden |= (place // chunk)[:, None] != (place // chunk)[None]
    scores = scores.masked_fill(is_hidden, float("-inf"))
    if (sinks := options.get("s_aux")) is not None:
        scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(-1, num, 1)], -1)
    return (scores.softmax(-1)[..., :num] @ value).transpose(0, 1)


def attend(
    kernel: Kernel | TritonBackend | None,
    case: Case,
    chunks: Sequence[int],
    *,
    min_rows: int = 1,
    place: Place = IN_MEMORY,
) -> list[Tensor]:
    """Each sequence's rows [n, H, D], fed in steps in which every unfinished sequence takes its
    next chunk."""
    attention = Attention(kernel, both_ways=case.both_ways)
    num_blocks = sum(blocks_for(n) for n in case.lengths) + 1
    kv = PagedKv(
        layers={LAYER: case.shape}, num_blocks=num_blocks, dtype=case.dtype, device=place.device
    )
    for tensor in (kv.keys[LAYER], kv.values[LAYER]):
        tensor.fill_(float("nan"))  # what was never written must never count
    attention.bind(kv)
    rows = case.rows()
    tables = shuffled_tables(case.lengths, num_blocks, place.shuffle)
    options = {
        name: each.to(place.device) if isinstance(each, Tensor) else each
        for name, each in case.options.items()
    }
    outputs: list[list[Tensor]] = [[] for _ in case.lengths]
    for step in _steps(case.lengths, chunks):
        spans = [
            Span(start=start, length=count, blocks=tables[index]) for index, start, count in step
        ]
        micro_batch = MicroBatch.of(spans, min_rows=min_rows, device=place.device)
        attention.use(micro_batch)
        query, key, value = (
            _pack(
                [rows[index][part][:, start : start + count] for index, start, count in step],
                micro_batch,
            ).to(place.device)
            for part in range(3)
        )
        out, _ = attention.attend(case.layer, query, key, value, None, **options)
        outs = (
            out[0]
            .cpu()
            .split(
                [count for _, _, count in step]
                + [micro_batch.num_rows - sum(count for _, _, count in step)]
            )
        )
        assert not outs[-1].any()
        for (index, _, _), rows_of_span in zip(step, outs, strict=False):
            outputs[index].append(rows_of_span)
    return [torch.cat(parts) for parts in outputs]


def shuffled_tables(lengths: Sequence[int], num_blocks: int, seed: int) -> list[list[int]]:
    """Blocks for each sequence, scattered over the pool."""
    free = random.Random(seed).sample(range(num_blocks), num_blocks)
    return [[free.pop() for _ in range(blocks_for(n))] for n in lengths]


def _steps(lengths: Sequence[int], chunks: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    done = [0] * len(lengths)
    sizes = cycle(chunks)
    while any(start < n for start, n in zip(done, lengths, strict=True)):
        step = [
            (i, done[i], min(next(sizes), n - done[i]))
            for i, n in enumerate(lengths)
            if done[i] < n
        ]
        for index, _, count in step:
            done[index] += count
        yield step


def _pack(parts: list[Tensor], micro_batch: MicroBatch) -> Tensor:
    """[1, heads, rows, D], with rubbish in the padding rows."""
    packed = torch.cat(parts, dim=1)
    padding = packed.new_full(
        (packed.shape[0], micro_batch.num_rows - packed.shape[1], packed.shape[2]), float("nan")
    )
    return torch.cat([packed, padding], dim=1)[None]
