"""Whether a stage gives a row the same bits whatever runs beside it: checked on the loaded shard, and named by a hash.

The three rules stand in docs/decisions; `RULES_VERSION` changes when they do. Knows no scheduler and no job.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import structlog
import torch
import transformers
from torch import Tensor

from services.stage.attention.paged_kv import Span
from services.stage.device.machine import machine
from services.stage.model.products import products
from services.stage.model.row_buckets import RUNGS, Panels
from services.stage.model.row_counts import ladders
from services.stage.model.shard import Shard
from services.stage.scheduling.kv_blocks import BLOCK_TOKENS
from shardline.rounding import ceil_div

log = structlog.get_logger(__name__)

RULES_VERSION = 3
MAX_LENGTH = BLOCK_TOKENS + 9
"""The tested sequence crosses a block's edge."""
CHUNK = 37
MAX_BESIDE = 30

Forward = Callable[[Sequence[Span], Tensor, list[int]], Tensor]
"""Runs packed spans on their inputs; what the stage gives for the wanted rows: hidden states, or logits on a tail."""


class Probe:
    """Runs one sequence in several ways and compares every bit. Uses KV blocks from 0 up: nothing may be open."""

    def __init__(self, forward: Forward, inputs: Callable[[int, torch.Generator], Tensor], num_blocks: int) -> None:
        self._forward = forward
        self._length = min(MAX_LENGTH, num_blocks * BLOCK_TOKENS)
        self._blocks = list(range(ceil_div(self._length, BLOCK_TOKENS)))
        self._beside = list(range(len(self._blocks), min(num_blocks, len(self._blocks) + MAX_BESIDE)))
        generator = torch.Generator().manual_seed(RULES_VERSION)
        self._inputs = inputs(self._length, generator)
        self._others = inputs(BLOCK_TOKENS, generator)

    def passes(self) -> bool:
        """Rules 1 and 2, on this device, with these weights."""
        whole = self._run(0, self._length)
        last = whole[-1:]
        ways: tuple[Callable[[], Tensor], ...] = (
            lambda: self._run(self._length - 1, self._length),
            self._run_for_the_last,
            self._run_beside_decodes,
            self._run_beside_prefill,
        )
        return torch.equal(whole, self._run_chunks()) and all(torch.equal(last, way()) for way in ways)

    def _run(self, start: int, end: int) -> Tensor:
        span = Span(start=start, length=end - start, blocks=self._blocks)
        return self._forward([span], self._inputs[start:end], list(range(end - start)))

    def _run_for_the_last(self) -> Tensor:
        """As a prompt's prefill runs: only its last row is wanted."""
        whole = Span(start=0, length=self._length, blocks=self._blocks)
        return self._forward([whole], self._inputs, [self._length - 1])

    def _run_chunks(self) -> Tensor:
        starts = range(0, self._length, CHUNK)
        return torch.cat([self._run(start, min(start + CHUNK, self._length)) for start in starts])

    def _run_beside_decodes(self) -> Tensor:
        """The last token, first of a batch of first tokens."""
        spans = [self._last_token(), *(Span(start=0, length=1, blocks=[block]) for block in self._beside)]
        return self._forward(spans, torch.cat([self._inputs[-1:], self._others[: len(self._beside)]]), [0])

    def _run_beside_prefill(self) -> Tensor:
        """The last token before another's prefill, which its own wanted rows join."""
        prefill = [Span(start=0, length=BLOCK_TOKENS, blocks=[block]) for block in self._beside[:2]]
        rows = torch.cat([self._inputs[-1:], *([self._others] * len(prefill))])
        return self._forward([self._last_token(), *prefill], rows, list(range(len(rows))))[:1]

    def _last_token(self) -> Span:
        return Span(start=self._length - 1, length=1, blocks=self._blocks)


def settle_rows(shard: Shard, *, is_wanted: bool, token_budget: int, cache_folder: Path) -> tuple[Panels, bool]:
    """Tells the shard's products which numbers of rows they may see; how rows are padded for them, and whether no
    number of rows up to the budget can change a row's bits. Unless that `is_wanted`, nothing is tried."""
    if shard.device.type != "cpu":
        return Panels(ladders=frozenset()), False
    found, are_all = products(shard.model)
    is_wanted = is_wanted and are_all
    told = ladders(found, machine=machine(), cache_folder=cache_folder) if is_wanted else {}
    agree = is_wanted and all(told.values())
    used = {product: told.get(product) or RUNGS for product in found}
    for product, ladder in used.items():
        product.settle(ladder)
    panels = Panels(
        ladders=frozenset(used.values()) or frozenset({RUNGS}), widths=shard.widths, num_threads=torch.get_num_threads()
    )
    if agree and not panels.are_whole(token_budget):
        log.warning(
            "threads cannot share rows by whole vectors", widths=sorted(shard.widths), threads=panels.num_threads
        )
        return panels, False
    return panels, agree


def exactness_fingerprint(
    *,
    weights: str,
    dtype: torch.dtype,
    kernel: str,
    packed: bool,
    num_threads: int,
    device: torch.device,
) -> str:
    """sha256 of all that decides a row's bits on this stage. Equal fingerprints, equal tokens."""
    facts: Final = {
        "rules": RULES_VERSION,
        "weights": weights,
        "dtype": str(dtype),
        "kernel": kernel,
        "packed": packed,
        "threads": num_threads,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "machine": machine() if device.type == "cpu" else torch.cuda.get_device_name(device),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
