"""SIGTERM as a redeploy sends it: what runs drains, the supervisor starts it again."""

from __future__ import annotations

import random

import psutil

from services.standalone.processes import wait_until_gone
from tests.chaos.faults.fault import Fault, NotInjected, Simple
from tests.chaos.faults.kill_faults import ROLES, missing, pick
from tests.chaos.stack.local_target import LocalTarget

MARGIN_S = 15.0


def terminate(role: str) -> Fault:
    """SIGTERM; it must end by itself, within its drain time."""

    def inject(target: LocalTarget, rng: random.Random) -> None:
        name, pid = pick(target, rng, role)
        process = psutil.Process(pid)
        process.terminate()
        if not wait_until_gone(process, timeout_s=target.times.drain_s + MARGIN_S):
            process.kill()
            raise NotInjected(
                f"{name} did not end within {target.times.drain_s + MARGIN_S:.0f} s after SIGTERM"
            )

    return Simple(
        kind=f"terminate {role}", inject=inject, why_not=lambda target: missing(target, role)
    )


def rolling(target: LocalTarget, rng: random.Random) -> None:
    """All services, one after the other, as an upgrade does."""
    for role in ("relay", "gateway", *(f"stage-{index}" for index in range(target.num_stages))):
        terminate(role).strike(target, rng)


FAULTS: tuple[Fault, ...] = (
    *(terminate(role) for role in ROLES),
    Simple(kind="redeploy everything", inject=rolling),
)
