"""Fault after fault, with at least one job ended between two of them. Knows no particular fault and no row."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import httpx
import psutil
import psycopg
import redis

from tests.faults.arming import NeverStruck
from tests.faults.checker import Finding
from tests.faults.drawing import drawn
from tests.faults.fault import Broken, Fault, NotInjected
from tests.faults.report import Struck
from tests.faults.target import Target

RESTART_S = 45.0
"""The supervisor's longest wait before it starts a process again, and the start of a stage on a busy machine."""

REPLAY_S = 15.0

MISSED = (
    NotInjected,
    NeverStruck,
    httpx.HTTPError,
    psycopg.Error,
    redis.RedisError,
    psutil.Error,
    OSError,
    subprocess.SubprocessError,
)
"""A fault before this one may still be felt by the tools that inject the next."""

Say = Callable[[str], None]
TargetT = TypeVar("TargetT", bound=Target)


class Storm(Generic[TargetT]):
    """What was struck, and what came of it."""

    def __init__(self, world: TargetT, faults: Sequence[Fault[TargetT]], *, seed: int, say: Say) -> None:
        self._world = world
        self._rng = random.Random(seed)
        self._say = say
        self.struck: list[Struck] = []
        self._impossible = {fault.kind: why for fault in faults if (why := fault.missing(world)) is not None}
        self._missed: dict[str, str] = {}
        self.findings: list[Finding] = []
        self._possible = [fault for fault in faults if fault.kind not in self._impossible]

    def rage(self, *, duration_s: float, max_faults: int | None) -> None:
        """Until the time or the number is up."""
        began_s = time.monotonic()
        self._recover("the start of the load")
        for fault in self._drawn():
            at_s = time.monotonic() - began_s
            if at_s > duration_s or (max_faults is not None and len(self.struck) >= max_faults):
                return
            self._strike(fault, at_s)

    @property
    def not_run(self) -> dict[str, str]:
        """Kinds that were never injected, with the reason."""
        struck = {each.kind for each in self.struck}
        return {kind: why for kind, why in {**self._missed, **self._impossible}.items() if kind not in struck}

    def _drawn(self) -> Iterator[Fault[TargetT]]:
        return drawn(self._possible, self._rng) if self._possible else iter(())

    def _strike(self, fault: Fault[TargetT], at_s: float) -> None:
        began_s = time.monotonic()
        try:
            fault.strike(self._world, self._rng)
        except MISSED as error:
            self._missed[fault.kind] = f"{type(error).__name__}: {error}"
            self._say(f"{at_s:7.1f} s  {fault.kind}: not injected: {error!r}")
            return
        except Broken as error:
            self.findings.append(Finding(invariant="I10", count="broken", what=f"{fault.kind}: {error}"))
            self._say(f"{at_s:7.1f} s  {fault.kind}: broken: {error}")
        took_s = time.monotonic() - began_s
        recovery_s = self._recover(fault.kind)
        self.struck.append(
            Struck(at_s=at_s, kind=fault.kind, is_kill=fault.is_kill, took_s=took_s, recovery_s=recovery_s)
        )
        what = "no job ended in time" if recovery_s is None else f"the next job ended {recovery_s:.1f} s later"
        self._say(f"{at_s:7.1f} s  {fault.kind}: {took_s:.1f} s, {what}")

    def _recover(self, after: str) -> float | None:
        """I7: seconds until the next job has ended."""
        since_s = time.time()
        limit_s = recovery_max_s(self._world)
        ended_s = self._world.journal.wait_for_end(since_s, limit_s)
        if ended_s is None:
            what = f"no job ended within {limit_s:.0f} s after {after}"
            self.findings.append(Finding(invariant="I7", count="late_recoveries", what=what))
            return None
        return ended_s - since_s


def recovery_max_s(world: Target) -> float:
    """Lease, sweep, restart, replay."""
    times = world.times
    return times.lease_s + 2 * times.poll_s + times.unbind_s + RESTART_S + REPLAY_S
