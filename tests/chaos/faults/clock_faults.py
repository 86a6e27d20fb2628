"""One process's wall clock jumps and jumps back. Time is Postgres's, or monotonic: nothing may come
of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import psutil

from tests.chaos.faults.fault import Fault, NotInjected, Simple, hold
from tests.chaos.stack.local_target import LocalTarget

LEASES = 1.5
ROLES = ("stage", "relay", "gateway")
JUMP_S = 2 * 3600.0
"""Further than any time of the protocol or of Celery's transport."""


def jumping(role: str, shift_s: float) -> Callable[[LocalTarget, random.Random], None]:
    """For more than a lease."""

    def inject(target: LocalTarget, rng: random.Random) -> None:
        name, pid = target.pick(rng, role)
        if not target.clock.has(pid):
            raise NotInjected(f"{name} has not preloaded the clock")
        target.clock.shift(pid, shift_s)
        hold(LEASES * target.times.lease_s)
        target.clock.shift(pid, 0.0)

    return inject


def ahead_and_gone(target: LocalTarget, rng: random.Random) -> None:
    """A head dies while its clock is wrong: what it wrote last stays."""
    name, pid = target.pick(rng, "stage-0")
    if not target.clock.has(pid):
        raise NotInjected(f"{name} has not preloaded the clock")
    target.clock.shift(pid, JUMP_S)
    hold(LEASES * target.times.lease_s)
    psutil.Process(pid).kill()


def why_not(target: LocalTarget) -> str | None:
    """As the library's build said."""
    return target.clock.why_not


def _faults() -> Iterator[Fault]:
    for role in ROLES:
        for way, shift_s in (("ahead", JUMP_S), ("behind", -JUMP_S)):
            yield Simple(
                kind=f"clock: a {role} two hours {way}",
                inject=jumping(role, shift_s),
                why_not=why_not,
            )
    yield Simple(
        kind="clock: a head two hours ahead dies",
        inject=ahead_and_gone,
        is_kill=True,
        why_not=why_not,
    )


FAULTS: tuple[Fault, ...] = tuple(_faults())
