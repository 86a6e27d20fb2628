"""Shardline under Compose as a stack that faults may hurt: a project of its own, with quick times.
Knows no fault."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg

from services.standalone.ports import LOOPBACK, is_taken
from shardline.base.config import Times
from shardline.contract.job import MAX_CRASHES
from tests.chaos.load.target import Running, TargetRun
from tests.chaos.load.users import CLERK
from tests.chaos.load.workload import of_users
from tests.chaos.report.finding import Finding
from tests.chaos.stack.options import KV_OFFLOAD_MIB, SMALL_KV_MIB, TIME_SCALE, Options
from tests.compose.engine import Docker
from tests.compose.stack import Stack, until
from tests.repository import REPOSITORY

PROJECT = "shardline-chaos"
NETWORK = f"{PROJECT}_shardline"
PUBLISHED = "tests/compose/published.yaml"
LOGS_KEPT = REPOSITORY / ".local" / "chaos-compose-logs"
MEASURED = ("gateway", "relay", "stage-0", "stage-1", "flower")
PLAIN = "sslmode=disable&gssencmode=disable"
LASTING = ("container", "network", "volume")
"""What `docker compose down --volumes` must remove."""

PORTS = range(20_000, 32_000)
"""Below those that systems give to outgoing connections: nobody takes one while its container is
down."""

LIVE = "SELECT count(*) FROM pipelines WHERE lease_until > now() AND ready_at IS NOT NULL"


@dataclass(kw_only=True)
class ComposeTarget(TargetRun):
    """All containers of one project."""

    stack: Stack
    urls: Mapping[str, str]
    times: Times
    num_stages: int = 2
    num_more_stages: int = 0

    @property
    def database_url(self) -> str:
        """The harness comes in where producers do: there is no proxy on the way."""
        return self.urls["database"]

    @property
    def redis_url(self) -> str:
        """Likewise."""
        return self.urls["redis"]

    def num_pipelines(self) -> int:
        """Those that are ready."""
        with psycopg.connect(self.database_url, connect_timeout=10) as connection:
            ((number,),) = connection.execute(LIVE).fetchall()
        return int(number)

    def running(self) -> dict[str, Running]:
        """In our services' containers: of each the process that holds most, which is not the
        container's init."""
        ours = f"--filter=label={self.stack.label}"
        names = self.stack.docker.run("ps", ours, "--format={{.Names}}", check=False).stdout.split()
        containers = {
            ".".join(name.removeprefix(f"{PROJECT}-").rsplit("-", 1)): name
            for name in sorted(names)
        }
        return {
            place: largest
            for place, name in containers.items()
            if place.startswith(MEASURED) and (largest := self._largest(name)) is not None
        }

    def _largest(self, name: str) -> Running | None:
        """None: the container does not run."""
        lines = self.stack.docker.run(
            "top", name, "-o", "pid,rss", check=False
        ).stdout.splitlines()[1:]
        processes = [
            Running(pid=int(pid), rss_bytes=int(kib) << 10) for pid, kib in map(str.split, lines)
        ]
        return max(processes, key=lambda each: each.rss_bytes, default=None)

    def end(self) -> list[Finding]:
        """`docker compose down`. Returns what is left of the project (I5)."""
        keep_logs(self.stack)
        self.stack.compose("down", "--volumes", "--remove-orphans")
        left = [(kind, name) for kind in LASTING for name in self._left(kind)]
        return [
            Finding(invariant="I5", count="orphans", what=f"{kind} {name} lives on")
            for kind, name in left
        ]

    def logs(self) -> list[Path]:
        """Of its containers, as they were kept at its end."""
        return list(LOGS_KEPT.iterdir())

    def _left(self, kind: str) -> list[str]:
        every = ("--all",) if kind == "container" else ()
        return self.stack.docker.run(
            kind, "ls", *every, "--quiet", f"--filter=label={self.stack.label}"
        ).stdout.split()


@contextmanager
def compose_target(options: Options, docker: Docker) -> Iterator[ComposeTarget]:
    """A ready stack; at the end nothing of it is left but its logs."""
    folder = Path(tempfile.mkdtemp(prefix="shardline-chaos-"))
    gateway, postgres, redis = _ports()
    stack = Stack(
        docker,
        folder,
        project=PROJECT,
        overlays=(PUBLISHED,),
        SHARDLINE_TIME_SCALE=str(TIME_SCALE),
        SHARDLINE_MAX_CRASHES=str(MAX_CRASHES),
        SHARDLINE_DTYPE=options.dtype,
        SHARDLINE_KV_MIB=str(SMALL_KV_MIB[options.dtype]),
        SHARDLINE_KV_OFFLOAD_MIB=str(KV_OFFLOAD_MIB),
        SHARDLINE_HTTP_PORTS=str(gateway),
        CHAOS_POSTGRES_PORT=str(postgres),
        CHAOS_REDIS_PORT=str(redis),
    )
    try:
        stack.build()
        began_s = time.monotonic()
        stack.up()
        target = ComposeTarget(
            stack=stack,
            urls={
                "gateway": f"http://{LOOPBACK}:{gateway}",
                "database": f"{_from_outside(stack, 'database_url', postgres)}/shardline?{PLAIN}",
                "redis": f"{_from_outside(stack, 'redis_url', redis)}/0",
                "api_key": stack.api_key,
            },
            times=Times().scaled(TIME_SCALE),
            workload=of_users([CLERK]),
        )
        until(lambda: target.num_pipelines() == 1)
        target.start_s = time.monotonic() - began_s
        yield target
    finally:
        keep_logs(stack)
        stack.remove()
        shutil.rmtree(folder, ignore_errors=True)


def keep_logs(stack: Stack) -> None:
    """Those of the containers that are there: the evidence of what a run found."""
    filters = ("--all", f"--filter=label={stack.label}")
    names = stack.docker.run("ps", *filters, "--format={{.Names}}").stdout.split()
    if not names:
        return
    shutil.rmtree(LOGS_KEPT, ignore_errors=True)
    LOGS_KEPT.mkdir(parents=True)
    for name in names:
        logs = stack.docker.run("logs", "--timestamps", name)
        (LOGS_KEPT / f"{name}.log").write_text(logs.stdout + logs.stderr)


def _ports() -> list[int]:
    """One each for gateway, Postgres and Redis."""
    return [port for port in random.sample(PORTS, 100) if not is_taken(port)][:3]


def _from_outside(stack: Stack, name: str, port: int) -> str:
    """The containers' URL of a server without its path, by its published port."""
    user, _, _ = (stack.secrets / name).read_text().rpartition("@")
    return f"{user}@{LOOPBACK}:{port}"
