"""The stack under test as a fault sees it, on servers that the harness runs itself. Knows no fault and no invariant."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import psutil

from services.standalone.processes import is_alive
from services.standalone.servers import Postgres, Valkey
from services.standalone.state_dir import SUPERVISOR
from shardline.config import Times
from tests.faults import family
from tests.faults.clock import Clock
from tests.faults.disk import Disk
from tests.faults.finding import Finding
from tests.faults.hop_net import HopNet
from tests.faults.journal import Journal
from tests.faults.proxy import Proxy
from tests.faults.target import Running
from tests.faults.users import SCRIBE
from tests.faults.workload import LoadName, Workload
from tests.stack import REPOSITORY, Stack, until

TIME_SCALE = 0.25
KV_MIB = 64
"""Of each stage: more than the lab's load ever needs."""
SMALL_KV_MIB: Mapping[str, int] = MappingProxyType({"float32": 6, "bfloat16": 4})
"""Of each stage by dtype, for users: a fraction of what the open jobs could use. Half of it holds the longest twice."""

SECOND = f".{SCRIBE.name}"
"""Behind the names of the second stack's processes."""

LOGS_KEPT = REPOSITORY / ".local" / "chaos-logs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What stack to hurt, and for how long."""

    seed: int
    minutes: float
    faults: str = "all"
    load: LoadName = LoadName.USERS
    dtype: str = "float32"
    stages: int = 2
    replicas: int = 1
    time_scale: float = TIME_SCALE
    """Of the protocol's times: a larger one where the machine is busy with other things."""
    exact: bool = True
    """False: attention without our kernel, so that a resume may give other tokens."""
    patience_s: float = 180.0
    """Everything must end so soon after the last fault."""
    model: Path | None = None
    """Another one than the demo model, under its name."""
    insecure: bool = False
    """Hops without CURVE: frames can be lost and repeated then."""
    redis_lasts: bool = False
    """No fault harms what Redis holds: what it has taken is never sent again."""


@dataclass(kw_only=True)
class World:
    """Faults strike in the main thread: servers that they restart are tied to it."""

    stack: Stack
    second: Stack | None
    """Of another model, with services of its own, on the same servers."""
    postgres: Postgres
    redis: Valkey
    redis_proxy: Proxy
    database_proxy: Proxy
    hop_net: HopNet
    clock: Clock
    disk: Disk
    model: Path
    """Of this stack alone: it may be damaged."""
    times: Times
    failpoints: Path
    kv_mib: Path
    """A file with the KV memory that a stage takes when it starts."""
    num_stages: int
    workload: Workload
    journal: Journal = field(default_factory=Journal)
    start_s: float = 0.0
    """How long the stack took to get ready."""
    calm_s: float = 0.0
    """How long it took for the whole set of requests, undisturbed."""

    @property
    def num_more_stages(self) -> int:
        """Of the second stack, which has one pipeline of one stage."""
        return 0 if self.second is None else 1

    @property
    def urls(self) -> Mapping[str, str]:
        """Where producers reach the stack."""
        return self.stack.urls

    @property
    def database_url(self) -> str:
        """For the harness itself: past every proxy."""
        return self.postgres.url()

    @property
    def redis_url(self) -> str:
        """For the harness itself: past every proxy."""
        return self.redis.url

    def pids(self) -> dict[str, int]:
        """Of up.json, those that live."""
        pids: dict[str, int] = dict(self.stack.look()["processes"])
        if self.second is not None:
            others: Mapping[str, int] = self.second.look()["processes"]
            pids |= {f"{name}{SECOND}": pid for name, pid in others.items()}
        return {name: pid for name, pid in pids.items() if is_running(pid)}

    def running(self) -> dict[str, Running]:
        """Likewise, with their memory."""
        return family.running(self.pids())

    def end(self) -> list[Finding]:
        """Stop it. Returns the processes that live on (I5)."""
        stacks = [self.stack] if self.second is None else [self.second, self.stack]
        relatives = family.family(self.pids().values(), {one for stack in stacks for one in stack.seen})
        for stack in stacks:
            stack.end()
        return [finding for stack in stacks for finding in family.orphans(stack.home.folder, relatives)]

    def pick(self, rng: random.Random, prefix: str) -> tuple[str, int]:
        """A living process of the first stack by the beginning of its name; waits for one that is being restarted."""
        until(lambda: bool(self._matching(prefix)))
        return rng.choice(sorted(self._matching(prefix).items()))

    def pick_any(self, rng: random.Random, prefix: str) -> tuple[str, int]:
        """Of either stack."""
        until(lambda: bool(self._matching(prefix)))
        others = self._matching(prefix, SECOND)
        return rng.choice(sorted((self._matching(prefix) | others).items()))

    def _matching(self, prefix: str, suffix: str = "") -> dict[str, int]:
        return {
            name: pid
            for name, pid in self.pids().items()
            if name.startswith(prefix) and name.endswith(SECOND) == bool(suffix) and not name.startswith(SUPERVISOR)
        }


def is_running(pid: int) -> bool:
    """Whether the process lives: neither gone nor a zombie."""
    try:
        return is_alive(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


def no_foreign_settings() -> None:
    """What the caller's shell says of SHARDLINE_* must not reach the stack under test."""
    for name in [name for name in os.environ if name.startswith("SHARDLINE_")]:
        del os.environ[name]
