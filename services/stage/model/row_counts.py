"""Tries which numbers of rows leave the bits of a product alone, and remembers the answer on disk.

Knows no model: a product is a function of rows. It must see one changed element in 100,000, so it compares 400,000 for
each number of rows, and makes them tell: the first outputs of its rows nearly cancel, so that what another order of
summation does to the last bits of a sum is not rounded away. In bfloat16 that shows in some 3 of 100 elements what
ordinary rows show in 4 of 100,000. The work is that of one prompt of some 2,000 tokens through each distinct product.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor

from services.stage.model import cache
from services.stage.model.row_buckets import REFERENCE_ROWS, RUNGS, Ladder
from shardline.rounding import ceil_div, round_up

log = structlog.get_logger(__name__)

MIN_COMPARED = 400_000
"""Elements for each number of rows. A rate of 1 in 100,000 stays unseen once in 50 times where rows do not tell."""
MAX_ROWS = 4096
"""For products so narrow that all their outputs tell."""
SAMPLED_OUTPUTS = 16
"""Rows of a weight that are enough to make rows tell."""
SHIFTS = (7, 33)
"""Rows must keep their bits in other places of a panel too."""
RIDGE = 1e-4
"""Of the mean square: weights may hold equal rows, or none but zeros."""


Key = tuple[str, int, int, str]
Run = Callable[[Tensor], Any]
"""Rows [T, width] to a tensor [T, ...] or several."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Product:
    """Rows [T, width] times one weight."""

    run: Run
    settle: Callable[[Ladder], None]
    """From now on it sees these numbers of rows."""
    width: int
    outputs: int
    dtype: torch.dtype
    sample: Tensor
    """Some rows of the weight [S, width]."""
    kind: str
    """Which library call it is: products of one kind and shape take the same path."""

    @property
    def key(self) -> Key:
        """Equal for products that need to be tried once."""
        return self.kind, self.width, self.outputs, str(self.dtype)


def ladders(products: Iterable[Product], *, machine: object, cache_folder: Path) -> dict[Product, Ladder]:
    """For each product the numbers of rows that give the bits of REFERENCE_ROWS; empty if rows of it depend on each
    other even so. `machine`: whatever libraries choose their kernels by."""
    began_s = time.perf_counter()
    found: dict[Key, Ladder] = {}
    told: dict[Product, Ladder] = {}
    for product in products:
        if product.key not in found:
            found[product.key] = _remembered(product, machine, cache_folder)
            if not found[product.key]:
                log.warning("rows of a product depend on each other", product=product.key)
        told[product] = found[product.key]
    tried_s = round(time.perf_counter() - began_s, 2)
    sizes = sorted({(ladder[0], ladder[-1]) for ladder in found.values() if ladder})
    log.info("numbers of rows that keep every bit", fewest_and_most=sizes, products=len(found), tried_s=tried_s)
    return told


def _remembered(product: Product, machine: object, cache_folder: Path) -> Ladder:
    facts = (RUNGS, REFERENCE_ROWS, MIN_COMPARED, MAX_ROWS, product.key, torch.get_num_threads(), machine)
    name = f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()}.rows"
    ladder = _read(cache.recall(cache_folder, name))
    if ladder is None:
        ladder = fitting_counts(product)
        cache.store(cache_folder, name, json.dumps(ladder))
    return ladder


@torch.inference_mode()
def fitting_counts(product: Product) -> Ladder:
    """The rungs whose bits are those of REFERENCE_ROWS; empty if a row's place in a panel matters."""
    needed = min(ceil_div(MIN_COMPARED, product.outputs), MAX_ROWS)
    whole = round_up(max(needed, *RUNGS), REFERENCE_ROWS)
    rows = telling_rows(product, whole + max(SHIFTS))
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

    return tuple(count for count in RUNGS if count == REFERENCE_ROWS or keeps_bits(count))


def telling_rows(product: Product, num_rows: int) -> Tensor:
    """Random rows whose products with `sample` nearly cancel."""
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
    """One tensor for each that the product gives, of the first rows in panels of `count`."""
    parts = [product.run(rows[first : first + count]) for first in range(0, num_rows, count)]
    if isinstance(parts[0], Tensor):
        return [torch.cat(parts)]
    return [torch.cat(each) for each in zip(*parts, strict=True)]


def _equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def _read(text: str | None) -> Ladder | None:
    """None for what this version did not write."""
    try:
        counts = json.loads(text or "")
    except ValueError:
        return None
    is_list = isinstance(counts, list) and all(count in RUNGS for count in counts)
    return tuple(counts) if is_list and (not counts or REFERENCE_ROWS in counts) else None
