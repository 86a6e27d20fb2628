"""The clocks of heads, followers and relays. None that decides anything jumps: the wall clock is
only shown.

All of them read time here, through `time.clock_gettime`: the simulation of the protocol takes the
place of that one function.
"""

from __future__ import annotations

import time

LEASE_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Linux; where a system has none, a suspended machine loses that time."""


def lease_clock_s() -> float:
    """Seconds since some moment of this machine's start. It goes on while the machine is suspended,
    as Postgres's clock does elsewhere."""
    return time.clock_gettime(LEASE_CLOCK)


def monotonic_s() -> float:
    """Seconds since some moment of this machine's start, without those in suspension."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def process_s() -> float:
    """Seconds that processors have worked for this process, all its threads together."""
    return time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID)


def thread_s() -> float:
    """Seconds that a processor has worked for the calling thread."""
    return time.clock_gettime(time.CLOCK_THREAD_CPUTIME_ID)


def wall_clock_s() -> float:
    """Seconds since 1970 by this host's clock, which may jump: to show moments of several hosts
    side by side."""
    return time.clock_gettime(time.CLOCK_REALTIME)
