"""A shifted clock is shifted for one process alone, and monotonic time is not; leases know a
suspension."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chaos.shims.clock import Clock

TELL = """
import sys, time
from shardline.base.clock import lease_clock_s
for _ in sys.stdin: print(time.time(), time.monotonic(), lease_clock_s(), flush=True)
"""
FORK = """
import os, sys, time
if os.fork():
    os.wait()
else:
    print(os.getpid(), flush=True)
    sys.stdin.readline()
print(time.time(), flush=True)
"""
HOUR_S = 3600.0
NEAR_S = HOUR_S / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The clocks of a process at one moment."""

    wall_s: float
    monotonic_s: float
    lease_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shifted:
    """A process whose clocks a test moves."""

    clock: Clock
    pid: int
    told: Callable[[], Told]


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Shifted]:
    clock = Clock(tmp_path)
    assert clock.why_not is None
    environment = {**os.environ, **clock.environment, "LD_PRELOAD": str(clock.library)}
    with subprocess.Popen(
        [sys.executable, "-c", TELL],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:

        def told() -> Told:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write("\n")
            child.stdin.flush()
            wall_s, monotonic_s, lease_s = map(float, child.stdout.readline().split())
            return Told(wall_s=wall_s, monotonic_s=monotonic_s, lease_s=lease_s)

        yield Shifted(clock=clock, pid=child.pid, told=told)


def test_a_shifted_clock_moves_only_the_wall_clock_of_its_process(process: Shifted) -> None:
    before = process.told()
    assert abs(before.wall_s - time.time()) < NEAR_S
    for shift_s in (HOUR_S, -HOUR_S, 0.0):
        process.clock.shift(process.pid, shift_s)
        now = process.told()
        assert abs(now.wall_s - before.wall_s - shift_s) < NEAR_S
        assert before.monotonic_s <= now.monotonic_s < before.monotonic_s + NEAR_S
        assert before.lease_s <= now.lease_s < before.lease_s + NEAR_S
    assert process.clock.has(process.pid)
    assert not process.clock.has(os.getpid())


def test_time_in_suspension_counts_when_leases_are_judged(process: Shifted) -> None:
    before = process.told()

    process.clock.suspend(process.pid, HOUR_S)

    now = process.told()
    assert before.monotonic_s <= now.monotonic_s < before.monotonic_s + NEAR_S
    assert before.lease_s + HOUR_S <= now.lease_s < before.lease_s + HOUR_S + NEAR_S


def test_a_forked_process_has_a_clock_of_its_own(tmp_path: Path) -> None:
    clock = Clock(tmp_path)
    environment = {**os.environ, **clock.environment, "LD_PRELOAD": str(clock.library)}
    with subprocess.Popen(
        [sys.executable, "-c", FORK],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        clock.shift(pid, HOUR_S)
        process.stdin.write("\n")
        process.stdin.flush()
        of_fork, of_parent = (float(process.stdout.readline()) for _ in range(2))

    assert pid != process.pid
    assert of_fork - of_parent > NEAR_S
