"""Fault after fault, with at least one job ended between two of them. Knows no particular fault and
no row.

I7, recovery: from the moment in which a fault is undone (a kill: in which the process is gone)
until a job that was accepted before has a new token at its reader, or ends. What arrives within the
first heartbeat was under way and does not count. The limit is NOISE * (lease + sweep + unbind +
replay), and if a gateway, relay or stage was started anew meanwhile, NOISE * (… + restart):

    sweep    two polls of the relays, and a re-send of a message that was lost
    unbind   a stage leaves a head that died
    replay   the undisturbed pass of this run: it computes more tokens than are ever open
    restart  the supervisor's longest pause, and the start of the whole stack in this run
"""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import httpx
import psutil
import psycopg
import redis

from services.standalone.process_group import MAX_DELAY_S
from shardline.base.config import Times
from tests.chaos.driver.drawing import drawn
from tests.chaos.faults.arming import NeverStruck
from tests.chaos.faults.fault import Broken, Fault, NotInjected, hold
from tests.chaos.load.target import Target
from tests.chaos.report.finding import Finding
from tests.chaos.report.report import Struck

NOISE = 2.0
"""Two cores, which others use too: what was measured in a calm minute may take twice as long."""

ON_THE_PATH = ("gateway", "relay", "stage", "worker")
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

    def __init__(
        self, target: TargetT, faults: Sequence[Fault[TargetT]], *, seed: int, say: Say
    ) -> None:
        self._target = target
        self._rng = random.Random(seed)
        self._say = say
        self.struck: list[Struck] = []
        self._impossible = {
            fault.kind: why for fault in faults if (why := fault.missing(target)) is not None
        }
        self._missed: dict[str, str] = {}
        self.findings: list[Finding] = []
        self._possible = [fault for fault in faults if fault.kind not in self._impossible]

    def rage(self, *, duration_s: float, max_faults: int | None) -> None:
        """Until the time or the number is up."""
        began_s = time.monotonic()
        self._wait_for_end(time.time(), "the start of the load")
        for fault in self._drawn():
            at_s = time.monotonic() - began_s
            if at_s > duration_s or (max_faults is not None and len(self.struck) >= max_faults):
                return
            self._strike(fault, at_s)

    @property
    def not_run(self) -> dict[str, str]:
        """Kinds that were never injected, with the reason."""
        struck = {each.kind for each in self.struck}
        return {
            kind: why
            for kind, why in {**self._missed, **self._impossible}.items()
            if kind not in struck
        }

    def _drawn(self) -> Iterator[Fault[TargetT]]:
        return drawn(self._possible, self._rng) if self._possible else iter(())

    def _strike(self, fault: Fault[TargetT], at_s: float) -> None:
        began_s = time.monotonic()
        before = _on_the_path(self._target)
        try:
            fault.strike(self._target, self._rng)
        except MISSED as error:
            self._missed[fault.kind] = f"{type(error).__name__}: {error}"
            self._say(f"{at_s:7.1f} s  {fault.kind}: not injected: {error!r}")
            return
        except Broken as error:
            self.findings.append(
                Finding(invariant="I10", count="broken", what=f"{fault.kind}: {error}")
            )
            self._say(f"{at_s:7.1f} s  {fault.kind}: broken: {error}")
        took_s = time.monotonic() - began_s
        undone_s = time.time()
        recovery_s, restarted = self._recover(fault.kind, undone_s, before)
        limit_s = recovery_max_s(self._target, restarted=bool(restarted))
        ended_s = self._wait_for_end(undone_s, fault.kind)
        struck = Struck(
            at_s=at_s,
            kind=fault.kind,
            is_kill=fault.is_kill,
            took_s=took_s,
            restarted=restarted,
            recovery_s=recovery_s,
            recovery_max_s=limit_s,
            ended_s=ended_s,
        )
        self.struck.append(struck)
        self._say(
            f"{at_s:7.1f} s  {fault.kind}: {took_s:.1f} s, {_told(recovery_s)},"
            f" next job {_told(ended_s)}"
        )

    def _recover(
        self, after: str, undone_s: float, before: Mapping[str, int]
    ) -> tuple[float | None, list[str]]:
        """I7: seconds until accepted jobs go on, and what was started anew for it."""
        hold(self._target.times.heartbeat_s)
        mark = self._target.journal.mark()
        progress_s = self._target.journal.wait_for_progress(
            mark, recovery_max_s(self._target, restarted=True)
        )
        now = _on_the_path(self._target)
        restarted = [name for name, pid in before.items() if now.get(name) != pid]
        limit_s = recovery_max_s(self._target, restarted=bool(restarted))
        recovery_s = None if progress_s is None else progress_s - undone_s
        if recovery_s is None or recovery_s > limit_s:
            what = (
                f"no accepted job went on within {limit_s:.0f} s after {after}: {_told(recovery_s)}"
            )
            self._find_late(what)
        return recovery_s, restarted

    def _wait_for_end(self, since_s: float, after: str) -> float | None:
        """Seconds until the next job ends: every fault meets a stack that works."""
        limit_s = recovery_max_s(self._target, restarted=True)
        ended_s = self._target.journal.wait_for_end(since_s, limit_s)
        if ended_s is None:
            self._find_late(f"no job ended within {limit_s:.0f} s after {after}")
            return None
        return ended_s - since_s

    def _find_late(self, what: str) -> None:
        self.findings.append(Finding(invariant="I7", count="late_recoveries", what=what))


def recovery_max_s(target: Target, *, restarted: bool) -> float:
    """Lease, sweep, unbind, replay, and perhaps a restart."""
    times = target.times
    sweep_s = 2 * times.poll_s + times.resend_s
    restart_s = MAX_DELAY_S * times.lease_s / Times().lease_s + target.start_s
    return NOISE * (
        times.lease_s + sweep_s + times.unbind_s + target.calm_s + (restart_s if restarted else 0.0)
    )


def _on_the_path(target: Target) -> dict[str, int]:
    return {
        name: each.pid for name, each in target.running().items() if name.startswith(ON_THE_PATH)
    }


def _told(seconds: float | None) -> str:
    return "not in time" if seconds is None else f"after {seconds:.1f} s"
