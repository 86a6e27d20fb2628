"""The clock of leases: it never jumps, and it goes on while the machine is suspended, as Postgres's does elsewhere."""

from __future__ import annotations

import time

CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Linux; where a system has none, a suspended machine loses that time."""


def lease_clock_s() -> float:
    """Seconds since some moment of this machine's start."""
    return time.clock_gettime(CLOCK)
