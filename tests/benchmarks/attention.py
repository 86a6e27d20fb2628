"""Attention alone: one layer's call beside the time in which the same thread count reads the same
bytes of KV.

    python -m tests.benchmarks.attention [--dtype bfloat16] [--threads 1] [--dim 64] [--library FILE
    ...]

Calls go over as many layers as make a call find its KV in memory, not in a cache, as in a step of a
whole model. KV blocks are scattered. `--library` names built kernels to compare,
`kernel-<isa>-<hash>.so`; all run in turn.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

from services.stage.attention.attention import KvShape, MicroBatch, PagedKv, Span
from services.stage.attention.kernel_backend import KernelBackend
from services.stage.attention.paged_kv import AttentionParams, PackedQkv
from services.stage.kernels.kernel import Kernel, load
from shardline_scheduler.kv_blocks import BLOCK_TOKENS, blocks_for

CACHE_BYTES = 384 << 20
"""More than any cache holds: each round reads this much at least."""
NUM_KV_HEADS = 8
GROUPS = {64: 2, 128: 4}
"""Query heads for each KV head, by head size: the bench's model, and one of 8 B."""


@dataclass(frozen=True, slots=True)
class Work:
    """Rows of one call: (number of sequences, tokens before, new tokens) of each kind."""

    name: str
    parts: tuple[tuple[int, int, int], ...]

    def spans(self) -> list[tuple[int, int]]:
        """First position and length of each sequence's rows."""
        return [(before, new) for count, before, new in self.parts for _ in range(count)]

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV is read, once for each sequence."""
        return sum(before + new for before, new in self.spans())


WORKS = (
    Work("decode 64 x 160", ((64, 159, 1),)),
    Work("decode 64 x 512", ((64, 511, 1),)),
    Work("decode 64 x 2048", ((64, 2047, 1),)),
    Work("prefill 1 x 512", ((1, 0, 512),)),
    Work("prefill 4 x 128", ((4, 0, 128),)),
    Work("mixed 32 + 480", ((32, 159, 1), (1, 0, 480))),
)


class Layers:
    """KV of enough layers, and one layer's new rows."""

    def __init__(self, work: Work, dtype: torch.dtype, dim: int) -> None:
        self.shape = KvShape(num_kv_heads=NUM_KV_HEADS, head_dim=dim)
        self.read_bytes = (
            work.num_tokens * PagedKv.bytes_per_block({0: self.shape}, dtype) // BLOCK_TOKENS
        )
        spans = work.spans()
        num_blocks = sum(blocks_for(before + new) for before, new in spans)
        self.num_layers = min(64, math.ceil(CACHE_BYTES / self.read_bytes))
        self.kv = PagedKv(
            layers=dict.fromkeys(range(self.num_layers), self.shape),
            num_blocks=num_blocks,
            dtype=dtype,
        )
        for tensors in (self.kv.keys, self.kv.values):
            for tensor in tensors.values():
                tensor.view(torch.int16).random_(0x3C00, 0x3F00)  # small numbers in every dtype
        free = random.Random(1).sample(range(num_blocks), num_blocks)
        self.micro_batch = MicroBatch.of(
            [
                Span(start=a, length=n, blocks=[free.pop() for _ in range(blocks_for(a + n))])
                for a, n in spans
            ]
        )
        num_rows = self.micro_batch.num_rows
        num_heads = NUM_KV_HEADS * GROUPS[dim]
        packed = (
            torch.randn(num_rows, num_heads + 2 * NUM_KV_HEADS, dim).to(dtype).transpose(0, 1)[None]
        )
        query, key, value = packed.split([num_heads, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
        self.qkv = PackedQkv(query=query, key=key, value=value)

    def attend(self, backend: KernelBackend, layer: int) -> None:
        """One call."""
        backend.attend(layer, self.qkv, AttentionParams(scale=0.125))

    def read(self, layer: int) -> None:
        """Reads as many bytes as a call does, from end to end."""
        for tensor in (self.kv.keys[layer], self.kv.values[layer]):
            _floats(tensor)[: self.read_bytes // 8].sum()


def _floats(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.float32)


def timed(work: Callable[[int], None], layer: int) -> float:
    """Seconds."""
    began_s = time.perf_counter()
    work(layer)
    return time.perf_counter() - began_s


def measure(work: Work, kernels: Sequence[Kernel], options: argparse.Namespace) -> str:
    """One line: microseconds of a call for each kernel, in floors, and the floor's rate.

    Calls alternate, each on the next layer; the lower quartile, since others who use the memory
    only add.
    """
    layers = Layers(work, getattr(torch, options.dtype), options.dim)
    runs: list[Callable[[int], None]] = [layers.read]
    for kernel in kernels:
        backend = KernelBackend(kernel)
        backend.bind(layers.kv)
        backend.use(layers.micro_batch)
        runs.append(partial(layers.attend, backend))
    times: list[list[float]] = [[] for _ in runs]
    next_layer = cycle(range(layers.num_layers))
    end_s = time.perf_counter() + options.seconds
    while time.perf_counter() < end_s or len(times[0]) < 10:
        for run, seconds in zip(runs, times, strict=True):
            seconds.append(timed(run, next(next_layer)))
    floor_s, *ours_s = (statistics.quantiles(seconds)[0] for seconds in times)
    figures = "".join(f"{1e6 * s:9.0f} us {s / floor_s:6.2f} x" for s in ours_s)
    rate = layers.read_bytes / floor_s / 1e9
    return f"{work.name:<17} {figures}   floor {1e6 * floor_s:6.0f} us, {rate:5.1f} GB/s"


@torch.inference_mode()
def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dim", type=int, default=64, choices=GROUPS)
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="of each line, at least ten calls"
    )
    parser.add_argument("--only", default="", help="part of a line's name")
    parser.add_argument("--library", type=Path, action="append", default=[])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kernels = [Kernel(path, path.name.split("-")[1]) for path in options.library]
    if not kernels:
        own = load()
        assert own is not None, "no kernel"
        kernels = [own]
    names = ", ".join(kernel.path.stem for kernel in kernels)
    print(f"{options.dtype}, dim {options.dim}, threads {options.threads}: {names}")
    for work in WORKS:
        if options.only in work.name:
            print(measure(work, kernels, options), flush=True)


if __name__ == "__main__":
    main()
