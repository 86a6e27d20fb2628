"""The clocks of heads, followers and relays. None of them jumps; knows no wall clock.

All of them read time here, through `time.clock_gettime`: the simulation of the protocol takes the place of that one
function.
"""

from __future__ import annotations

import time

LEASE_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Linux; where a system has none, a suspended machine loses that time."""


def lease_clock_s() -> float:
    """Seconds since some moment of this machine's start. It goes on while the machine is suspended, as Postgres's
    clock does elsewhere."""
    return time.clock_gettime(LEASE_CLOCK)


def monotonic_s() -> float:
    """Seconds since some moment of this machine's start, without those in suspension."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)
