"""What tests and benchmarks ask of a fleet: its plan, what serves, jobs that keep it busy, one more
worker."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

import psutil
from sqlalchemy import Engine, text

from shardline.client import Client
from shardline.store import fleets, pipelines
from shardline.store.fleets import FleetPlan
from tests.polling import until
from tests.repository import REPOSITORY
from tests.stack import Stack

MODEL = "clerk"
BACKLOG = 96
"""Jobs: more than a head has seats."""
ACTIVE = text("SELECT count(*) FROM jobs WHERE state IN ('queued', 'running')")


def plan(database: Engine) -> FleetPlan:
    """The present one."""
    with database.connect() as connection:
        return fleets.plan_of(connection, MODEL)


def layers(database: Engine) -> list[tuple[int, ...]]:
    """Of the stages of each ready pipeline."""
    with database.connect() as connection:
        ready = [each for each in pipelines.live_pipelines(connection) if each.ready]
    return [tuple(stage["layers"]) for each in ready for stage in each.stages]


def keep_busy(
    database: Engine, client: Client, prompts: Sequence[str], params: Mapping[str, Any]
) -> list[UUID]:
    """Adds as many jobs as fill every seat, so that some are always under way, however fast the
    fleet is."""
    with database.connect() as connection:
        num_active = connection.execute(ACTIVE).scalar_one()
    return [
        client.submit(MODEL, prompt=prompts[number % len(prompts)], **params)
        for number in range(BACKLOG - num_active)
    ]


def start_third(stack: Stack, **settings: str) -> subprocess.Popen[bytes]:
    """One more worker, as the second one was started but for these settings."""
    environment = until(lambda: _environment(stack, "worker-1"))
    environment |= {
        "SHARDLINE_WORKER_NAME": "third",
        **{f"SHARDLINE_{name}": each for name, each in settings.items()},
    }
    with (stack.home.folder / "logs" / "third.log").open("ab") as log:
        argv = [sys.executable, "-m", "services.stage"]
        return subprocess.Popen(argv, env=environment, cwd=REPOSITORY, stdout=log, stderr=log)


def _environment(stack: Stack, name: str) -> dict[str, str]:
    """Of a process of the stack; nothing while it is started again, as a worker is that gets other
    layers."""
    pid = stack.look()["processes"].get(name)
    try:
        return {} if pid is None else psutil.Process(pid).environ()
    except psutil.NoSuchProcess:
        return {}
