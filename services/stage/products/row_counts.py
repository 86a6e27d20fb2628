"""Finds the numbers of rows that do not change the bits of a product, and caches the answer on
disk.

Knows no model: a product is a function of rows. The probe must see one changed element in 100,000,
so it compares 400,000 for each number of rows, and uses sensitive rows: their first outputs nearly
cancel, so that what another order of summation does to the last bits of a sum is not rounded away.
In bfloat16 another order changes some 3 of 100 such elements, but only 4 of 100,000 of ordinary
rows. The probe costs as much as one prompt of some 2,000 tokens through each distinct product.

Letters of shapes: T rows, K inputs of a product, S sampled outputs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor

from services.stage.products import cache
from services.stage.products.row_buckets import REFERENCE_ROWS, ROW_BUCKETS, Buckets
from shardline.base.clock import monotonic_s
from shardline.base.rounding import ceil_div, round_up

log = structlog.get_logger(__name__)

MIN_COMPARED = 400_000
"""Elements compared for each number of rows. With ordinary rows a rate of 1 in 100,000 is missed
once in 50 times."""
MAX_ROWS = 4096
"""The most rows compared: a product with so few outputs that it would need more has sensitive
outputs only."""
SAMPLED_OUTPUTS = 16
"""Rows of a weight that are enough to find sensitive inputs."""
SHIFTS = (7, 33)
"""Rows must keep their bits at other offsets in a panel too."""
RIDGE = 1e-4
"""Added to the diagonal, as a share of its mean: weights may hold equal rows, or nothing but
zeros."""


ProductKey = tuple[str, int, int, str]
Run = Callable[[Tensor], Any]
"""Maps rows [T, K] to a tensor [T, ...] or a tuple of such tensors."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Product:
    """A matrix product: rows [T, K] in `dtype` times one weight."""

    run: Run
    use_buckets: Callable[[Buckets], None]
    """Makes the product see only these numbers of rows from now on."""
    width: int
    """K, the length of an input row."""
    outputs: int
    dtype: torch.dtype
    sample: Tensor
    """[S, K] in `dtype`: some rows of the weight."""
    kind: str
    """Which library call it is: products of one kind and shape take the same path."""

    @property
    def key(self) -> ProductKey:
        """A key that is equal for products of which only one needs to be tried."""
        return self.kind, self.width, self.outputs, str(self.dtype)


def find_buckets(
    products: Iterable[Product], *, machine: object, cache_folder: Path
) -> dict[Product, Buckets]:
    """Returns for each product the numbers of rows that give the bits of REFERENCE_ROWS, from the
    cache if possible.

    They are empty for a product if its rows depend on their offset in a panel. `machine` is all
    that the libraries choose their kernels by: another machine needs a new trial.
    """
    began_s = monotonic_s()
    found: dict[ProductKey, Buckets] = {}
    of_product: dict[Product, Buckets] = {}
    for product in products:
        if product.key not in found:
            found[product.key] = _cached_buckets(product, machine, cache_folder)
            if not found[product.key]:
                log.warning("rows of a product depend on each other", product=product.key)
        of_product[product] = found[product.key]
    tried_s = round(monotonic_s() - began_s, 2)
    sizes = sorted({(buckets[0], buckets[-1]) for buckets in found.values() if buckets})
    log.info(
        "numbers of rows that keep every bit",
        fewest_and_most=sizes,
        products=len(found),
        tried_s=tried_s,
    )
    return of_product


def _cached_buckets(product: Product, machine: object, cache_folder: Path) -> Buckets:
    facts = (
        ROW_BUCKETS,
        REFERENCE_ROWS,
        MIN_COMPARED,
        MAX_ROWS,
        product.key,
        torch.get_num_threads(),
        machine,
    )
    name = f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()}.rows"
    buckets = _read(cache.recall(cache_folder, name))
    if buckets is None:
        buckets = exact_buckets(product)
        cache.store(cache_folder, name, json.dumps(buckets))
    return buckets


@torch.inference_mode()
def exact_buckets(product: Product) -> Buckets:
    """Runs the product with each number of ROW_BUCKETS; returns those that give the bits of
    REFERENCE_ROWS.

    The result is empty if a row's bits depend on its offset in a panel.
    """
    needed = min(ceil_div(MIN_COMPARED, product.outputs), MAX_ROWS)
    whole = round_up(max(needed, *ROW_BUCKETS), REFERENCE_ROWS)
    rows = sensitive_rows(product, whole + max(SHIFTS))
    expected = _outputs(product, rows, REFERENCE_ROWS, whole)
    for shift in SHIFTS:
        shifted = _outputs(product, rows[shift:], REFERENCE_ROWS, whole)
        if not _equal([out[shift:] for out in expected], [out[: whole - shift] for out in shifted]):
            return ()

    def keeps_bits(count: int) -> bool:
        num_rows = round_up(needed, count)
        num_rows = num_rows if num_rows <= whole else whole // count * count
        got = _outputs(product, rows, count, num_rows)
        return _equal(got, [out[:num_rows] for out in expected])

    return tuple(count for count in ROW_BUCKETS if count == REFERENCE_ROWS or keeps_bits(count))


def sensitive_rows(product: Product, num_rows: int) -> Tensor:
    """Returns random rows [T, K] in the product's dtype: their outputs for `product.sample` nearly
    cancel."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(num_rows, product.width, generator=generator)
    sample = product.sample[: product.width // 2].float()
    gram = sample @ sample.T
    gram += RIDGE * gram.diagonal().mean() * torch.eye(len(gram))
    for _ in range(2):  # once more for what rounding left
        shares: Tensor = torch.linalg.lstsq(gram, sample @ rows.T).solution
        if torch.isfinite(shares).all():
            rows = (rows - shares.T @ sample).to(product.dtype).float()
    return rows.to(product.dtype)


def _outputs(product: Product, rows: Tensor, count: int, num_rows: int) -> list[Tensor]:
    """Runs the first `num_rows` rows [T, K] in panels of `count`; returns each tensor that the
    product returns."""
    parts = [product.run(rows[first : first + count]) for first in range(0, num_rows, count)]
    if isinstance(parts[0], Tensor):
        return [torch.cat(parts)]
    return [torch.cat(each) for each in zip(*parts, strict=True)]


def _equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def _read(text: str | None) -> Buckets | None:
    """Parses a cached answer; returns None for anything that this version did not write."""
    try:
        counts = json.loads(text or "")
    except ValueError:
        return None
    is_list = isinstance(counts, list) and all(count in ROW_BUCKETS for count in counts)
    return tuple(counts) if is_list and (not counts or REFERENCE_ROWS in counts) else None
