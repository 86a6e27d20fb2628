"""Plays seeds of the whole protocol: `python -m tests.simulation SEED` replays one, `--count` plays
those that follow.

Prints each broken seed with the faults that struck and the command that replays it. `--runs` plays
so many times `--count` seeds and leaves each run at its first broken seed: how often would a run
have noticed?
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulation.play import play

BROKEN_RUNS = "broken runs:"


def main() -> int:
    """From the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", type=int, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds")
    parser.add_argument(
        "--runs",
        type=int,
        default=0,
        help="so many runs of --count seeds, each up to its first break",
    )
    options = parser.parse_args()
    began_s = time.process_time()
    num_played = 0
    num_broken_runs = 0
    for run in range(max(1, options.runs)):
        first = options.seed + run * options.count
        is_broken = False
        for outcome in play(range(first, first + options.count)):
            num_played += 1
            if outcome.problem is not None:
                is_broken = True
                print(outcome.report(), flush=True)
                if options.runs:
                    break
        num_broken_runs += is_broken
    rate = num_played / (time.process_time() - began_s)
    print(
        f"{num_played} seeds, {rate:.1f} a second of processor time;"
        f" {BROKEN_RUNS} {num_broken_runs}"
    )
    return min(num_broken_runs, 1)


if __name__ == "__main__":
    sys.exit(main())
