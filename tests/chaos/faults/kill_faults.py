"""SIGKILL and SIGSTOP of every service. Knows processes by their names in up.json."""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress

import psutil

from services.standalone.processes import wait_until_gone
from tests.chaos.faults.fault import Fault, NotInjected, Simple, hold
from tests.chaos.stack.local_target import LocalTarget
from tests.ranks import other_ranks

LEASES = (0.5, 1.5, 5.0)
GONE_S = 10.0
HEAD = "head"
TAIL = "tail"
MIDDLE = "middle"
ROLES = (HEAD, MIDDLE, TAIL, "relay", "gateway", "flower")


def pick(target: LocalTarget, rng: random.Random, role: str) -> tuple[str, int]:
    """A living process in this role."""
    last = target.num_stages - 1
    if role == MIDDLE:
        if last < 2:
            raise NotInjected("the plan of the fleet has no middle any more")
        return target.pick(rng, f"stage-{rng.randrange(1, last)}")
    if role == TAIL:
        return target.pick(rng, f"stage-{last}")
    return target.pick_any(rng, {HEAD: "stage-0"}.get(role, role))


def other_rank(target: LocalTarget, rng: random.Random) -> psutil.Process:
    """A living process of a stage, which the supervisor did not start."""
    _, pid = target.pick(rng, "stage")
    try:
        ranks = other_ranks(psutil.Process(pid))
    except psutil.NoSuchProcess:
        ranks = []
    if not ranks:
        raise NotInjected("the stage has not started its ranks yet")
    return rng.choice(ranks)


def has_one_rank(target: LocalTarget) -> str | None:
    """Why no other rank can be hurt."""
    return None if target.num_ranks > 1 else "a stage is one process: TP=2 gives it another"


def missing(target: LocalTarget, role: str) -> str | None:
    """A short pipeline has no middle; one of a single stage has no tail of its own."""
    least = {MIDDLE: 3, TAIL: 2}.get(role, 1)
    return (
        None
        if target.num_stages >= least
        else f"a pipeline of {target.num_stages} stages has no {role} of its own"
    )


def kill(role: str) -> Fault:
    """SIGKILL; the supervisor starts it again."""

    def inject(target: LocalTarget, rng: random.Random) -> None:
        name, pid = pick(target, rng, role)
        process = psutil.Process(pid)
        process.kill()
        if not wait_until_gone(process, timeout_s=GONE_S):
            raise NotInjected(f"{name} survived SIGKILL")

    return Simple(
        kind=f"kill {role}",
        inject=inject,
        is_kill=True,
        why_not=lambda target: missing(target, role),
    )


def pause(role: str, leases: float) -> Fault:
    """SIGSTOP for a multiple of the lease, then SIGCONT."""

    def inject(target: LocalTarget, rng: random.Random) -> None:
        _, pid = pick(target, rng, role)
        os.kill(pid, signal.SIGSTOP)
        hold(leases * target.times.lease_s)
        # The supervisor may have ended it meanwhile, as it does with whatever hangs.
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGCONT)

    return Simple(
        kind=f"pause {role} {leases:g} leases",
        inject=inject,
        why_not=lambda target: missing(target, role),
    )


def kill_rank(target: LocalTarget, rng: random.Random) -> None:
    """SIGKILL; the stage ends with it, and the supervisor starts the stage again."""
    rank = other_rank(target, rng)
    rank.kill()
    if not wait_until_gone(rank, timeout_s=GONE_S):
        raise NotInjected("the rank survived SIGKILL")


def pause_rank(target: LocalTarget, rng: random.Random) -> None:
    """SIGSTOP for longer than a lease, then SIGCONT: a step waits, or its pipeline is lost."""
    rank = other_rank(target, rng)
    rank.suspend()
    hold(1.5 * target.times.lease_s)
    with suppress(psutil.NoSuchProcess):
        rank.resume()


KILLS: tuple[Fault, ...] = tuple(kill(role) for role in (*ROLES, "warm-parent"))
PAUSES: tuple[Fault, ...] = tuple(pause(role, leases) for role in ROLES[:-1] for leases in LEASES)
RANKS: tuple[Fault, ...] = (
    Simple(kind="kill rank", inject=kill_rank, is_kill=True, why_not=has_one_rank),
    Simple(kind="pause rank", inject=pause_rank, why_not=has_one_rank),
)
FAULTS = (*KILLS, *PAUSES, *RANKS)
