"""The whole matrix of exact rows on this processor, a process for each cell. Non-zero if rows said to be exact are not.

python -m tests.conformance [--prompts 300] [--isa AVX2 …] [--model clerk wide] [--dtype …] [--threads 1 2] [--stages …]
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys

from tests.conformance.matrix import DTYPES, ISAS, MODELS, THREADS, Cell, offered_isas


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
    is_held = True
    print(f"{'instruction set':<17} {'model':<6} {'dtype':<9} threads stages jobs  exact  changed among 64, 32, 3, 1")
    cells = itertools.product(options.isa, options.model, options.dtype, options.threads)
    for isa, model, dtype, threads in cells:
        cell = Cell(isa=isa, model=model, dtype=dtype, threads=threads)
        if threads > len(os.sched_getaffinity(0)):
            print(f"{isa:<17} {model:<6} {dtype:<9} {threads:>7} not run: there are not so many cores")
            continue
        for verdict in cell.verdicts(prompts=options.prompts, stages=options.stages):
            is_held &= verdict.is_held
            print(f"{isa:<17} {model:<6} {dtype:<9} {threads:>7} {verdict}", flush=True)
    missing = sorted(set(ISAS) - set(offered_isas()))
    print(f"ran: {', '.join(options.isa)}; not offered by this processor: {', '.join(missing) or 'none'}")
    return 0 if is_held else 1


if __name__ == "__main__":
    sys.exit(main())
