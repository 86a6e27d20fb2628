"""How many rows a packed batch is padded to: few different numbers, and a row's bits the same whatever runs beside it.

oneDNN compiles a product anew for each number of rows and keeps the code: about 3 ms and 0.5 MiB for each shape. So
numbers of rows climb a ladder of some forty rungs.

Two things change a row's arithmetic with the number of rows: a matrix kernel chosen for very few rows, and the ends of
the runs into which torch cuts an elementwise operation, one per thread. There the last few elements take a scalar path
whose `exp` has other bits. So rows are added until every run is a whole number of vectors.
"""

from __future__ import annotations

from functools import lru_cache

VECTORS = 64
"""Elements that torch's elementwise loops take at once, at most: two AVX-512 vectors of bfloat16."""
GRAIN = 32_768
"""Elements that torch gives a thread at least."""
MAX_ADDED = 512


def rung(num_rows: int) -> int:
    """The first rung that holds them: powers of two to 8, then eights to 64, sixteens to 256, thirty-twos above."""
    if num_rows <= 8:
        return 1 << (num_rows - 1).bit_length()
    apart = 8 if num_rows <= 64 else 16 if num_rows <= 256 else 32
    return -(-num_rows // apart) * apart


@lru_cache(maxsize=4096)
def padded_rows(num_rows: int, *, min_rows: int, widths: frozenset[int], num_threads: int) -> int:
    """The smallest number from these rows' rung on that is allowed. `widths`: row lengths of elementwise operations."""
    first = rung(max(num_rows, min_rows))
    for rows in range(first, first + MAX_ADDED):
        if all(_is_aligned(rows, width, num_threads) for width in widths):
            return rows
    return first  # Not to be had with these widths and threads: the probe at start will say so.


def _is_aligned(rows: int, width: int, num_threads: int) -> bool:
    size = rows * width
    runs = min(num_threads, -(-size // GRAIN))
    run = -(-size // runs)
    return size % VECTORS == 0 and run % VECTORS == 0 and (runs == 1 or width % VECTORS == 0 or run % width == 0)
