"""The whole matrix of exact rows on this processor, a process for each cell. Non-zero if rows said
to be exact are not.

python -m tests.conformance [--prompts 300] [--isa AVX2 …] [--model clerk wide] [--dtype …]
[--threads 1 2] [--stages …]

Cells run beside each other, each on cores of its own.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue

from tests.conformance.matrix import DTYPES, ISAS, MODELS, THREADS, Cell, offered_isas, usable_cores


def main() -> int:
    """A line for each cell and number of stages, then which instruction sets ran."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--isa", nargs="+", choices=list(ISAS), default=offered_isas())
    parser.add_argument("--model", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--threads", nargs="+", type=int, choices=THREADS, default=THREADS)
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 2, 3])
    options = parser.parse_args()
    print(
        f"{'instruction set':<17} {'model':<6} {'dtype':<9} threads stages jobs  exact"
        "  changed among 64, 32, 3, 1"
    )
    kept = [is_held for threads in options.threads for is_held in run(threads, options)]
    missing = sorted(set(ISAS) - set(offered_isas()))
    absent = ", ".join(missing) or "none"
    print(f"ran: {', '.join(options.isa)}; not offered by this processor: {absent}")
    return 0 if all(kept) else 1


def run(threads: int, options: argparse.Namespace) -> Iterator[bool]:
    """All cells with so many threads, as many at once as there are cores for; whether each kept its
    promise."""
    cores = usable_cores()
    num_at_once = len(cores) // threads
    if not num_at_once:
        print(f"{threads} threads: not run, there are not so many cores")
        return
    free: SimpleQueue[list[int]] = SimpleQueue()
    for place in range(num_at_once):
        free.put(cores[place * threads :][:threads])
    kinds = itertools.product(options.isa, options.model, options.dtype)
    cells = [
        Cell(isa=isa, model=model, dtype=dtype, threads=threads) for isa, model, dtype in kinds
    ]
    with ThreadPoolExecutor(num_at_once) as pool:
        yield from pool.map(partial(run_cell, free, options), cells)


def run_cell(free: SimpleQueue[list[int]], options: argparse.Namespace, cell: Cell) -> bool:
    """One of them, told line by line."""
    cores = free.get()
    is_held = True
    try:
        for verdict in cell.verdicts(prompts=options.prompts, stages=options.stages, cores=cores):
            is_held &= verdict.is_held
            print(
                f"{cell.isa:<17} {cell.model:<6} {cell.dtype:<9} {cell.threads:>7} {verdict}",
                flush=True,
            )
    finally:
        free.put(cores)
    return is_held


if __name__ == "__main__":
    sys.exit(main())
