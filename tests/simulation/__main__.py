"""Plays seeds of the whole protocol: `python -m tests.simulation SEED` replays one, `--count` plays those that follow.

Prints one line per broken seed, with the faults that struck and the command that replays it; the status says how many.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulation.play import play


def main() -> int:
    """From the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", type=int, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds")
    parser.add_argument("--first", action="store_true", help="stop at the first that breaks")
    options = parser.parse_args()
    began_s = time.process_time()
    num_broken = num_played = 0
    for outcome in play(range(options.seed, options.seed + options.count)):
        num_played += 1
        if outcome.problem is not None:
            num_broken += 1
            print(outcome.report())
            if options.first:
                break
    cpu_s = time.process_time() - began_s
    print(f"{num_broken} of {num_played} seeds broke; {num_played / cpu_s:.1f} seeds a second of processor time")
    return min(num_broken, 1)


sys.exit(main())
