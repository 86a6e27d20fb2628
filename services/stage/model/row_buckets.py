"""Which numbers of rows a product may see: how packed rows are padded to them, and cut into panels of them.

A library chooses the order in which a product is summed by its number of rows, so a row's bits depend on it. Each
product sees only the numbers of its ladder, for which its bits are known to be the same; fewer rows are padded, more
are cut into panels. Each number costs oneDNN a compilation and about 0.5 MiB for each shape, so there are few.

Neighbours reach a row in one more way: torch cuts an elementwise operation into runs, one per thread, and the last few
elements of a run take a scalar path whose `exp` has other bits. So rows are added until every run is whole vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shardline.rounding import ceil_div

REFERENCE_ROWS = 64
"""All other numbers of rows must give the bits that this one gives: so shards of any split agree, and so do panels."""

RUNGS = (
    *(2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 112, 120, 128),
    *(144, 160, 168, 176, 192, 208, 224, 240, 256, 320, 384, 448, 512),
)
"""No other numbers of rows are ever run, and not 1, which takes another kernel. Close enough that 3, 5 and 7 threads
find some that they share evenly. Those above 256 spare a full prefill the copy that puts panels together: 7 to 8 %."""

MIN_CUT = 256
"""More rows than this are rather cut in two than padded to the next rung."""

Ladder = tuple[int, ...]
"""Numbers of rows that one product may see, ascending. Empty: any."""

VECTORS = 64
"""Elements that torch's elementwise loops take at once, at most: two AVX-512 vectors of bfloat16."""
GRAIN = 32_768
"""Elements that torch gives a thread at least."""
MAX_ADDED = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Panels:
    """The numbers of rows that products may see, and the elementwise operations beside them."""

    ladders: frozenset[Ladder] = frozenset({RUNGS})
    """The products' own. Empty: rows are as they come (a GPU)."""
    widths: frozenset[int] = frozenset()
    """Row lengths of elementwise operations."""
    num_threads: int = 1

    def padded(self, num_rows: int) -> int:
        """The smallest number from `num_rows` on that each product can cut, with whole elementwise runs if possible."""
        return _padded(num_rows, self)

    def are_whole(self, max_rows: int) -> bool:
        """Whether every padded number up to this one has whole elementwise runs."""
        rows = 1
        while rows <= max_rows:
            padded = self.padded(rows)
            if not self.is_whole(padded):
                return False
            rows = padded + 1
        return True

    def is_whole(self, rows: int) -> bool:
        """Whether torch's threads all get whole vectors of this many rows."""
        return all(_is_whole(rows, width, self.num_threads) for width in self.widths)


@lru_cache(maxsize=4096)
def _padded(num_rows: int, panels: Panels) -> int:
    numbers = range(num_rows, num_rows + MAX_ADDED)
    could_be = [rows for rows in numbers if all(cut(rows, ladder) for ladder in panels.ladders)]
    return next((rows for rows in could_be if panels.is_whole(rows)), could_be[0])


def _is_whole(rows: int, width: int, num_threads: int) -> bool:
    size = rows * width
    runs = min(num_threads, ceil_div(size, GRAIN))
    run = ceil_div(size, runs)
    return size % VECTORS == 0 and run % VECTORS == 0 and (runs == 1 or width % VECTORS == 0 or run % width == 0)


@lru_cache(maxsize=4096)
def cut(num_rows: int, ladder: Ladder) -> tuple[int, ...]:
    """These rows as panels of allowed sizes: as many of the largest as there are, the rest in one, or two as equal as
    can be with one of the largest. Empty: it cannot be done, pad first."""
    if not ladder:
        return (num_rows,)
    largest = ladder[-1]
    num_full, rest = divmod(num_rows, largest)
    if not rest or rest in ladder:
        return (largest,) * num_full + ((rest,) if rest else ())
    if num_rows <= MIN_CUT:
        return ()
    if num_full:
        num_full, rest = num_full - 1, rest + largest
    halves = ((size, rest - size) for size in ladder if 2 * size >= rest and rest - size in ladder)
    pair = next(halves, ())
    return (largest,) * num_full + pair if pair else ()


def in_panels(run: Callable[[Tensor], Any], x: Tensor, ladder: Ladder) -> Any:
    """run(x) for rows x [T, K] or [1, T, K] that know nothing of each other, panel by panel. `run` gives a tensor
    [..., T, N] or several."""
    num_rows = x.shape[-2]
    sizes = cut(num_rows, ladder)
    if sizes == (num_rows,):
        return run(x)
    if not sizes:  # rows that a model chose itself
        total = Panels(ladders=frozenset({ladder})).padded(num_rows)
        x = torch.cat([x, x.new_zeros(*x.shape[:-2], total - num_rows, x.shape[-1])], dim=-2)
        sizes = cut(total, ladder)
    parts = [run(part) for part in x.split(sizes, dim=-2)]
    if isinstance(parts[0], Tensor):
        return torch.cat(parts, dim=-2).narrow(-2, 0, num_rows)
    return tuple(torch.cat(each, dim=-2).narrow(-2, 0, num_rows) for each in zip(*parts, strict=True))
