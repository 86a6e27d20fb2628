"""A fleet whose plan changes under load: other splits, workers that join, leave and die. For stacks
of such workers."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from uuid import uuid4

import psutil

from services.standalone.plan import ServiceProcess
from shardline.store import fleets
from shardline.store.connection.database import transaction
from tests.chaos.faults.fault import Broken, Fault, NotInjected, Simple
from tests.chaos.load.requests import MODEL
from tests.chaos.stack.local_target import LocalTarget
from tests.polling import within

PATIENCE_S = 120.0
"""A worker imports torch on cores that the others use."""


def resplit(target: LocalTarget, rng: random.Random) -> None:
    """Another cut into two stages, and workers that change places, as a coordinator plans it."""
    plan = target.fleet_plan()
    num_layers = plan.split[-1][1]
    bound = rng.randrange(1, num_layers)
    workers = sorted(plan.stages, key=lambda _: rng.random())
    with transaction(target.database_url) as connection:
        is_ours = fleets.store_plan(
            connection,
            MODEL,
            version=plan.version,
            split=((0, bound), (bound, num_layers)),
            stages={worker: place % 2 for place, worker in enumerate(workers)},
            tokens_per_s=None,
        )
    if not is_ours:
        raise NotInjected("a coordinator has planned at the same moment")


@contextmanager
def another(target: LocalTarget, rng: random.Random) -> Iterator[ServiceProcess]:
    """One worker more, on the cores of another. Raises Broken if the plan does not give it a
    stage."""
    _, pid = target.pick(rng, "stage-")
    name = f"joiner-{uuid4().hex[:6]}"
    folder = target.stack.home.folder
    own = {
        "SHARDLINE_WORKER_NAME": f"{MODEL}.{name}",
        "SHARDLINE_LOCK_DIR": str(folder / f"locks-{name}"),
    }
    environment = {**psutil.Process(pid).environ(), **own}
    worker = ServiceProcess(
        name, folder, argv=[sys.executable, "-m", "services.stage"], env=environment
    )
    worker.start()
    try:
        if not within(PATIENCE_S, partial(_has_stage, target, name)):
            raise Broken(f"{name} got no stage within {PATIENCE_S:.0f} s: {worker.log_tail()}")
        yield worker
    finally:
        with suppress(ProcessLookupError):
            worker.kill()


def join_and_leave(target: LocalTarget, rng: random.Random) -> None:
    """A worker joins, gets a stage, and is told to end."""
    with another(target, rng) as worker:
        worker.ask_to_end()
        if not within(target.times.drain_s + PATIENCE_S, lambda: not worker.is_running()):
            raise Broken(f"{worker.name} did not end")


def join_and_die(target: LocalTarget, rng: random.Random) -> None:
    """A worker joins, gets a stage, and is killed: its place in the fleet lasts for a lease."""
    with another(target, rng):
        pass


def _has_stage(target: LocalTarget, name: str) -> bool:
    return any(worker.startswith(f"{MODEL}.{name}@") for worker in target.fleet_plan().stages)


def _is_no_fleet(target: LocalTarget) -> str | None:
    return None if target.is_fleet else "its stages have numbers: WORKERS="


FAULTS: tuple[Fault, ...] = tuple(
    Simple(kind=kind, inject=inject, why_not=_is_no_fleet)
    for kind, inject in (
        ("another split", resplit),
        ("another split again", resplit),
        ("a worker joins and leaves", join_and_leave),
        ("a worker joins and dies", join_and_die),
    )
)
