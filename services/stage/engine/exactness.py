"""Checks on the loaded shard whether a row gets the same bits whatever runs next to it, and names
the result by a hash.

The three rules are in docs/decisions/exact-rows.md; `RULES_VERSION` changes when they do. Knows no
scheduler and no job.

Letters of shapes: T packed rows, R sampled rows.
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
from services.stage.model.shard import Shard
from services.stage.products.products import products
from services.stage.products.row_buckets import ROW_BUCKETS, RowPadding
from services.stage.products.row_counts import find_buckets
from services.stage.products.triton_products import are_covered
from shardline.base.rounding import ceil_div
from shardline_scheduler.kv_blocks import BLOCK_TOKENS

log = structlog.get_logger(__name__)

RULES_VERSION = 5
MAX_LENGTH = BLOCK_TOKENS + 9
"""Tokens of the tested sequence: it crosses the edge of a KV block."""
CHUNK = 37
MAX_BESIDE = 30

ComputeOutputs = Callable[[Sequence[Span], Tensor, list[int]], Tensor]
"""Runs packed spans on their inputs [T, ...]; returns the outputs [R, ...] of the listed rows:
hidden states, or logits on a tail, as `Forward.sampled_outputs` does."""


class Probe:
    """Runs one sequence in several ways and compares every bit. Uses KV blocks from 0 up: no
    sequence may be open."""

    def __init__(
        self,
        compute_outputs: ComputeOutputs,
        random_inputs: Callable[[int, torch.Generator], Tensor],
        num_blocks: int,
        *,
        num_slots: int | None = None,
    ) -> None:
        """`num_slots` are those of states; None: no layer is recurrent."""
        self._num_slots = num_slots
        self._compute_outputs = compute_outputs
        self._length = min(MAX_LENGTH, num_blocks * BLOCK_TOKENS)
        self._blocks = list(range(ceil_div(self._length, BLOCK_TOKENS)))
        self._beside = list(
            range(len(self._blocks), min(num_blocks, len(self._blocks) + MAX_BESIDE))
        )
        if num_slots is not None:
            del self._beside[num_slots - 1 :]
        generator = torch.Generator().manual_seed(RULES_VERSION)
        self._inputs = random_inputs(self._length, generator)
        self._others = random_inputs(BLOCK_TOKENS, generator)

    def passes(self) -> bool:
        """Whether rules 1 and 2 hold on this device with these weights."""
        whole = self._run(0, self._length)
        last = whole[-1:]
        chunks = self._run_chunks()
        ways: tuple[Callable[[], Tensor], ...] = (
            self._run_last,
            self._run_as_prompt,
            self._run_beside_decodes,
            self._run_beside_prefill,
        )
        return torch.equal(whole, chunks) and all(torch.equal(last, way()) for way in ways)

    def _run(self, start: int, end: int) -> Tensor:
        span = Span(start=start, length=end - start, blocks=self._blocks, state=0)
        return self._compute_outputs([span], self._inputs[start:end], list(range(end - start)))

    def _run_last(self) -> Tensor:
        return self._compute_outputs([self._last_token()], self._inputs[-1:], [0])

    def _run_as_prompt(self) -> Tensor:
        """Runs the prefill of a prompt: only its last row is sampled."""
        whole = Span(start=0, length=self._length, blocks=self._blocks, state=0)
        return self._compute_outputs([whole], self._inputs, [self._length - 1])

    def _run_chunks(self) -> Tensor:
        starts = range(0, self._length, CHUNK)
        return torch.cat([self._run(start, min(start + CHUNK, self._length)) for start in starts])

    def _run_beside_decodes(self) -> Tensor:
        """Runs the last token next to the first tokens of other sequences."""
        spans = [
            self._last_token(),
            *(
                Span(start=0, length=1, blocks=[block], state=state)
                for state, block in enumerate(self._beside, start=1)
            ),
        ]
        return self._compute_outputs(
            spans, torch.cat([self._inputs[-1:], self._others[: len(self._beside)]]), [0]
        )

    def _run_beside_prefill(self) -> Tensor:
        """The last token before the prefill of another sequence, of which all rows are sampled."""
        prefill = [
            Span(start=0, length=BLOCK_TOKENS, blocks=[block], state=state)
            for state, block in enumerate(self._beside[:2], start=1)
        ]
        rows = torch.cat([self._inputs[-1:], *([self._others] * len(prefill))])
        return self._compute_outputs([self._last_token(), *prefill], rows, list(range(len(rows))))[
            :1
        ]

    def _last_token(self) -> Span:
        """The span of the last token, with the state before it: keys and values are still there, a
        state has gone on."""
        if self._num_slots is not None:
            self._run(0, self._length - 1)
        return Span(start=self._length - 1, length=1, blocks=self._blocks, state=0)


def choose_row_buckets(
    shard: Shard, *, can_be_exact: bool, cache_folder: Path
) -> tuple[RowPadding, bool]:
    """Gives the shard's products their row buckets; returns how rows are padded for them, and
    whether no number of rows changes the bits of a product. What lies between products:
    `are_shared_whole`.

    If `can_be_exact` is false, since the attention is not exact either, nothing is tried, and every
    product gets all buckets. On an accelerator rows run as they come, and are exact if our own
    kernels compute all products and norms.
    """
    if shard.device.type != "cpu":
        return RowPadding(buckets=frozenset()), can_be_exact and are_covered(shard.model)
    found, are_all = products(shard.model)
    can_be_exact = can_be_exact and are_all
    exact = (
        find_buckets(found, machine=machine(), cache_folder=cache_folder) if can_be_exact else {}
    )
    are_exact = can_be_exact and all(exact.values())
    used = {product: exact.get(product) or ROW_BUCKETS for product in found}
    for product, buckets in used.items():
        product.use_buckets(buckets)
    padding = RowPadding(
        buckets=frozenset(used.values()),
        widths=shard.widths,
        num_threads=torch.get_num_threads(),
    )
    return padding, are_exact


def are_shared_whole(padding: RowPadding, token_budget: int) -> bool:
    """Whether torch's elementwise operations give each thread whole vectors for any number of rows
    up to the budget, so that the number does not change a row's bits."""
    if padding.are_whole(token_budget):
        return True
    log.warning(
        "threads cannot share rows by whole vectors",
        widths=sorted(padding.widths),
        threads=padding.num_threads,
    )
    return False


def exactness_fingerprint(
    *,
    weights: str,
    dtype: torch.dtype,
    kernel: str,
    packing: str,
    num_threads: int,
    device: list[str],
) -> str:
    """Returns the sha256 of all that decides a row's bits on this stage. Equal fingerprints mean
    equal tokens.

    `device` is its identity.
    """
    facts: Final = {
        "rules": RULES_VERSION,
        "weights": weights,
        "dtype": str(dtype),
        "kernel": kernel,
        "packing": packing,
        "threads": num_threads,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "machine": device,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
