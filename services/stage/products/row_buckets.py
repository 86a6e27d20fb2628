"""Row buckets: the numbers of rows that a product may see, and how packed rows are padded to them
or cut into panels.

A library chooses the order in which a product is summed by its number of rows, so a row's bits
depend on it. Each product sees only the numbers in its own buckets, for which its bits are known to
be the same; fewer rows are padded, more are cut into panels. Each number costs oneDNN a compilation
and about 0.5 MiB for each shape, so there are few.

Other rows affect a row's bits in one more way: torch divides an elementwise operation into shares,
one per thread, and the last few elements of a share take a scalar path with an `exp` that has other
bits. So rows are padded until every share consists of whole vectors. Knows no model.

Letters of shapes: T rows, K inputs and N outputs of a product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shardline.base.rounding import ceil_div

REFERENCE_ROWS = 64
"""All other numbers of rows must give the bits that this one gives: so shards of any split agree,
and so do panels."""

Buckets = tuple[int, ...]
"""Numbers of rows that one product may see, ascending. Empty: any number."""

ROW_BUCKETS: Buckets = (
    *(2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 112, 120, 128),
    *(144, 160, 168, 176, 192, 208, 224, 240, 256, 320, 384, 448, 512),
)
"""All numbers of rows that are ever run. 1 is left out because it takes another kernel. They are
close enough that 3, 5 and 7 threads find some that they share evenly. Those above 256 save a full
prefill the copy that joins panels: 7 to 8 % of its products."""

MIN_CUT = 256
"""More rows than this are cut into two panels rather than padded to the next bucket."""

VECTORS = 64
"""The most elements that torch's elementwise loops take at once: two AVX-512 vectors of
bfloat16."""
GRAIN = 32_768
"""The fewest elements that torch gives a thread."""
MAX_ADDED = 512
"""Padding rows that are tried, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPadding:
    """How packed rows are padded, given the buckets of all products and the elementwise operations
    between them."""

    buckets: frozenset[Buckets] = frozenset({ROW_BUCKETS})
    """The distinct buckets of the products. Empty: any number will do, on a GPU or with our own
    products."""
    widths: frozenset[int] = frozenset()
    """The row lengths of elementwise operations."""
    num_threads: int = 1

    def padded(self, num_rows: int) -> int:
        """Returns the smallest number from `num_rows` on that every product can cut into panels of
        its buckets.

        Numbers that also give every thread whole vectors are preferred.
        """
        return _padded(num_rows, self)

    def are_whole(self, max_rows: int) -> bool:
        """Whether `padded` gives every thread whole vectors for any number of rows up to
        `max_rows`."""
        rows = 1
        while rows <= max_rows:
            padded = self.padded(rows)
            if not self.is_whole(padded):
                return False
            rows = padded + 1
        return True

    def is_whole(self, rows: int) -> bool:
        """Whether every thread of torch gets whole vectors of this many rows."""
        return all(_is_whole(rows, width, self.num_threads) for width in self.widths)


@lru_cache(maxsize=4096)
def _padded(num_rows: int, padding: RowPadding) -> int:
    numbers = range(num_rows, num_rows + MAX_ADDED)
    could_be = [
        rows for rows in numbers if all(panel_sizes(rows, buckets) for buckets in padding.buckets)
    ]
    return next((rows for rows in could_be if padding.is_whole(rows)), could_be[0])


def _is_whole(rows: int, width: int, num_threads: int) -> bool:
    size = rows * width
    num_shares = min(num_threads, ceil_div(size, GRAIN))
    share = ceil_div(size, num_shares)
    if size % VECTORS or share % VECTORS:
        return False
    return num_shares == 1 or width % VECTORS == 0 or share % width == 0


@lru_cache(maxsize=4096)
def panel_sizes(num_rows: int, buckets: Buckets) -> tuple[int, ...]:
    """Returns how `num_rows` rows are cut into panels of allowed sizes; empty if they cannot be:
    pad them first.

    As many panels as possible have the largest size. The rest is one panel, or two of sizes as
    equal as possible, for which one of the largest is given up.
    """
    if not buckets:
        return (num_rows,)
    largest = buckets[-1]
    num_full, rest = divmod(num_rows, largest)
    if not rest or rest in buckets:
        return (largest,) * num_full + ((rest,) if rest else ())
    if num_rows <= MIN_CUT:
        return ()
    if num_full:
        num_full = num_full - 1
        rest = rest + largest
    halves = (
        (size, rest - size) for size in buckets if 2 * size >= rest and rest - size in buckets
    )
    pair = next(halves, ())
    return (largest,) * num_full + pair if pair else ()


def in_panels(run: Callable[[Tensor], Any], x: Tensor, buckets: Buckets) -> Any:
    """Returns run(x) for independent rows x [..., T, K] of any dtype, computed panel by panel.

    `run` returns one tensor [..., T, N] or a tuple of such tensors; so does this function.
    """
    num_rows = x.shape[-2]
    sizes = panel_sizes(num_rows, buckets)
    if sizes == (num_rows,):
        return run(x)
    if not sizes:  # a number of rows that the model itself chose, such as a mixture's
        total = RowPadding(buckets=frozenset({buckets})).padded(num_rows)
        x = torch.cat([x, x.new_zeros(*x.shape[:-2], total - num_rows, x.shape[-1])], dim=-2)
        sizes = panel_sizes(total, buckets)
    parts = [run(part) for part in x.split(sizes, dim=-2)]
    if isinstance(parts[0], Tensor):
        return torch.cat(parts, dim=-2).narrow(-2, 0, num_rows)
    return tuple(
        torch.cat(each, dim=-2).narrow(-2, 0, num_rows) for each in zip(*parts, strict=True)
    )
