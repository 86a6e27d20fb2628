"""A shifted clock is shifted for one process alone, and monotonic time is not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.faults.clock import Clock

TELL = "import sys, time\nfor _ in sys.stdin: print(time.time(), time.monotonic(), flush=True)"
HOUR_S = 3600.0


def test_given_a_process_when_its_clock_is_shifted_then_only_its_wall_clock_jumps(tmp_path: Path) -> None:
    clock = Clock(tmp_path)
    assert clock.why_not is None
    environment = {**os.environ, **clock.environment, "LD_PRELOAD": str(clock.library)}
    with subprocess.Popen(
        [sys.executable, "-c", TELL], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def told() -> tuple[float, float]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            wall_s, monotonic_s = map(float, process.stdout.readline().split())
            return wall_s, monotonic_s

        wall_s, monotonic_s = told()
        assert abs(wall_s - time.time()) < HOUR_S / 2
        for shift_s in (HOUR_S, -HOUR_S, 0.0):
            clock.shift(process.pid, shift_s)
            now_s, later_s = told()
            assert abs(now_s - wall_s - shift_s) < HOUR_S / 2
            assert monotonic_s <= later_s < monotonic_s + HOUR_S / 2
        assert clock.has(process.pid)
        assert not clock.has(os.getpid())
