"""The stack under test as a fault sees it, on servers that the harness runs itself. Knows no fault and no invariant."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from services.standalone.home import SUPERVISOR
from services.standalone.ports import LOOPBACK
from services.standalone.preload import preload
from services.standalone.processes import is_alive
from services.standalone.servers import FAST, Postgres, Valkey
from services.standalone.settings import CLERK, StandaloneSettings
from shardline.config import Times
from tests.faults import family
from tests.faults.checker import Finding
from tests.faults.clock import Clock
from tests.faults.disk import Disk
from tests.faults.hop_net import HopNet
from tests.faults.journal import Journal
from tests.faults.proxy import Proxy
from tests.faults.requests import MODEL
from tests.faults.shim import preloaded
from tests.faults.target import Running
from tests.stack import REPOSITORY, Stack, until

TIME_SCALE = 0.25
DEBUG = {"enable-debug-command": "local"}
PLAIN = "?sslmode=disable&gssencmode=disable"
KV_MIB = 64
"""Of each stage: more than the load ever needs."""

LOGS_KEPT = REPOSITORY / ".local" / "chaos-logs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What stack to hurt, and for how long."""

    seed: int
    minutes: float
    faults: str = "all"
    dtype: str = "float32"
    stages: int = 2
    replicas: int = 1
    exact: bool = True
    """False: attention without our kernel, so that a resume may give other tokens."""
    patience_s: float = 180.0
    """Everything must end so soon after the last fault."""
    model: Path | None = None
    """Another one than the demo model, under its name."""
    redis_lasts: bool = False
    """No fault harms what Redis holds: what it has taken is never sent again."""


@dataclass(kw_only=True)
class World:
    """Faults strike in the main thread: servers that they restart are tied to it."""

    stack: Stack
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
    num_stages: int
    journal: Journal = field(default_factory=Journal)
    start_s: float = 0.0
    """How long the stack took to get ready."""
    calm_s: float = 0.0
    """How long it took for the whole set of requests, undisturbed."""

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
        pids: Mapping[str, int] = self.stack.look()["processes"]
        return {name: pid for name, pid in pids.items() if is_running(pid)}

    def running(self) -> dict[str, Running]:
        """Likewise, with their memory."""
        return family.running(self.pids())

    def end(self) -> list[Finding]:
        """Stop it. Returns the processes that live on (I5)."""
        relatives = family.family(self.pids().values(), self.stack.seen)
        self.stack.end()
        return family.orphans(self.stack.home.folder, relatives)

    def pick(self, rng: random.Random, prefix: str) -> tuple[str, int]:
        """A living process by the beginning of its name; waits for one that is being restarted."""
        until(lambda: bool(self._matching(prefix)))
        return rng.choice(sorted(self._matching(prefix).items()))

    def _matching(self, prefix: str) -> dict[str, int]:
        return {name: pid for name, pid in self.pids().items() if name.startswith(prefix) and name != SUPERVISOR}


def is_running(pid: int) -> bool:
    """Whether the process lives: neither gone nor a zombie."""
    try:
        return is_alive(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


@contextmanager
def a_world(options: Options) -> Iterator[World]:
    """A ready stack in a folder of its own; at the end nothing of it is left but its logs."""
    folder = Path(tempfile.mkdtemp(prefix="shardline-chaos-"))
    failpoints = folder / "failpoints"
    failpoints.mkdir()
    with ExitStack() as ending:
        ending.callback(_keep_logs, folder)
        clock, disk = Clock(folder / "clocks"), Disk(folder / "disk")
        stage_preload = ending.enter_context(_preloaded(clock, disk))
        model = folder / "model" / MODEL
        shutil.copytree(options.model or CLERK, model)
        postgres = Postgres(folder / "servers", settings=FAST)
        ending.callback(postgres.kill)
        postgres.start()
        valkey = Valkey(folder / "servers", settings=DEBUG)
        ending.callback(valkey.kill)
        valkey.start()
        database_proxy = _proxy(ending, str(postgres.sockets / ".s.PGSQL.5432"))
        redis_proxy = _proxy(ending, (LOOPBACK, valkey.port))
        hop_net = HopNet()
        hop_net.start()
        ending.callback(hop_net.stop)
        stack = Stack(
            folder / "stack",
            SHARDLINE_DATABASE_URL=f"postgresql://shardline@{LOOPBACK}:{database_proxy.port}/shardline{PLAIN}",
            SHARDLINE_REDIS_URL=valkey.url.replace(f":{valkey.port}/", f":{redis_proxy.port}/"),
            **hop_net.settings,
            SHARDLINE_STAGE_PRELOAD=stage_preload,
            SHARDLINE_MODEL=str(model),
            SHARDLINE_CACHE_DIR=str(folder / "cache"),
            SHARDLINE_TIME_SCALE=str(TIME_SCALE),
            SHARDLINE_DTYPE=options.dtype,
            SHARDLINE_STAGES=str(options.stages),
            SHARDLINE_REPLICAS=str(options.replicas),
            SHARDLINE_KERNEL="auto" if options.exact else "off",
            SHARDLINE_KV_MIB=str(KV_MIB),
            SHARDLINE_FAILPOINTS=str(failpoints),
        )
        (folder / "stack").mkdir()
        began_s = time.monotonic()
        ending.callback(stack.end)
        stack.start()
        yield World(
            stack=stack,
            postgres=postgres,
            redis=valkey,
            redis_proxy=redis_proxy,
            database_proxy=database_proxy,
            hop_net=hop_net,
            clock=clock,
            disk=disk,
            model=model,
            times=Times().scaled(TIME_SCALE),
            failpoints=failpoints,
            num_stages=options.stages,
            start_s=time.monotonic() - began_s,
        )


@contextmanager
def _preloaded(clock: Clock, disk: Disk) -> Iterator[str]:
    """Servers and services preload both; gives what stages preload, which is these and their allocator."""
    shims = [shim for shim in (clock, disk) if shim.why_not is None]
    libraries = [shim.library for shim in shims]
    environment = {name: value for shim in shims for name, value in shim.environment.items()}
    with preloaded(libraries, environment):
        yield ":".join(filter(None, (*map(str, libraries), preload(StandaloneSettings()))))


def _proxy(ending: ExitStack, target: tuple[str, int] | str) -> Proxy:
    """What every service reaches this server through."""
    proxy = Proxy(target)
    proxy.start()
    ending.callback(proxy.stop)
    return proxy


def _keep_logs(folder: Path) -> None:
    """The last run's logs are the evidence of what it found."""
    shutil.rmtree(LOGS_KEPT, ignore_errors=True)
    for name in ("stack", "servers"):
        if (folder / name / "logs").exists():
            shutil.copytree(folder / name / "logs", LOGS_KEPT / name)
    if (folder / "stack" / "output").exists():
        shutil.copyfile(folder / "stack" / "output", LOGS_KEPT / "supervisor.log")
    shutil.rmtree(folder, ignore_errors=True)


def no_foreign_settings() -> None:
    """What the caller's shell says of SHARDLINE_* must not reach the stack under test."""
    for name in [name for name in os.environ if name.startswith("SHARDLINE_")]:
        del os.environ[name]
