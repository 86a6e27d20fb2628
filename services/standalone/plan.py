"""Which processes a stack has, their command lines and their environment. Pure: starts nothing,
reads no server."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.standalone import processes
from services.standalone.placement import StagePlacement
from services.standalone.ports import LOOPBACK
from services.standalone.processes import Child
from services.standalone.servers import socket_folder
from services.standalone.settings import REPOSITORY, StandaloneSettings
from services.standalone.state_dir import HOP_KEY_FILE
from services.standalone.warm_parent import WarmParent
from shardline_server.host.threads import spin_environment

METRICS_PORT = "SHARDLINE_METRICS_PORT"
FLOWER_USER = "shardline"
FLOWER_MAX_TASKS = 10_000
"""Flower keeps the newest tasks in memory; its own default is ten times this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Tells where a stack is reached. Key, database, Redis and Flower are secrets: never log them
    whole."""

    http_port: int
    flower_port: int
    flower_password: str
    api_key: str
    database: str
    redis: str

    @property
    def gateway(self) -> str:
        """The HTTP door."""
        return f"http://{LOOPBACK}:{self.http_port}"

    @property
    def flower(self) -> str:
        """Flower without its credentials, for people to see."""
        return f"http://{LOOPBACK}:{self.flower_port}"

    @property
    def flower_with_credentials(self) -> str:
        """Flower with its credentials, for programs: an HTTP client takes it as it is."""
        return f"http://{FLOWER_USER}:{self.flower_password}@{LOOPBACK}:{self.flower_port}"


class ServiceProcess(Child):
    """A child that is one command line with its own environment."""

    def __init__(
        self, name: str, home: Path, *, argv: Sequence[str], env: Mapping[str, str]
    ) -> None:
        super().__init__(name, home)
        self.argv = tuple(argv)
        self.env = dict(env)

    def start(self) -> None:
        """Start the process; whether it works shows later."""
        self.process = processes.spawn(self.argv, log=self.log, env=self.env, cwd=REPOSITORY)


class StageProcess(ServiceProcess):
    """A stage: forked of the warm parent, if that can, or a new program, which imports torch for
    seconds."""

    def __init__(
        self, name: str, home: Path, *, env: Mapping[str, str], warm_parent: WarmParent
    ) -> None:
        super().__init__(name, home, argv=[sys.executable, "-m", "services.stage"], env=env)
        self._warm_parent = warm_parent

    def start(self) -> None:
        """Start the process; whether it works shows later."""
        self.process = self._warm_parent.fork(self.name, self.env, self.log)
        if self.process is None:
            super().start()


@dataclass(frozen=True, slots=True, kw_only=True)
class StackPlan:
    """The services of a stack, by their role. Servers are not among them: their addresses must be
    known first. Nor is the warm parent: it starts before everything."""

    gateway: ServiceProcess
    relay: ServiceProcess
    heads: tuple[ServiceProcess, ...]
    others: tuple[ServiceProcess, ...]
    flower: ServiceProcess

    @property
    def stages(self) -> tuple[ServiceProcess, ...]:
        """Forks of the warm parent, which must be ready for that."""
        return (*self.heads, *self.others)

    @property
    def scrape_targets(self) -> list[dict[str, Any]]:
        """Returns them as Prometheus reads them from a file: each process with the port of its
        metrics, if it has one."""
        ports = {
            each.name: each.env.get(METRICS_PORT)
            for each in (self.gateway, self.relay, *self.stages)
        }
        return [
            {"targets": [f"{LOOPBACK}:{port}"], "labels": {"service": name}}
            for name, port in ports.items()
            if port
        ]

    @property
    def doors(self) -> tuple[ServiceProcess, ...]:
        """The services that need no warm parent."""
        return (self.relay, self.gateway, self.flower)

    @property
    def stop_order(self) -> list[list[Child]]:
        """Groups to stop in turn: the gateway; heads, which drain and need the stages behind them;
        all others."""
        return [[self.gateway], [*self.heads], [*self.others, self.relay, self.flower]]


def new_password() -> str:
    """A password that fits in a URL and in Flower's comma-separated option."""
    return secrets.token_urlsafe(24)


KV_SHARE_OF_HOST = 0.6
"""Of the memory that is free, all stages of the stack together."""


def make_warm_parent(
    settings: StandaloneSettings, home: Path, preload: str, stages: Sequence[StagePlacement] = ()
) -> WarmParent:
    """The parent of one stack's stages; they preload these libraries. If any share cores, threads
    of all sleep."""
    inherited = _inherited()
    are_cores_shared = any(place.shared for place in stages)
    environment = {
        **inherited,
        **spin_environment(inherited, are_cores_shared=are_cores_shared),
        "SHARDLINE_HOME": str(home),
        "SHARDLINE_MODEL": str(settings.folder or settings.model),
    }
    return WarmParent(home, environment | ({"LD_PRELOAD": preload} if preload else {}))


def make_plan(
    settings: StandaloneSettings,
    addresses: Addresses,
    stages: Sequence[StagePlacement],
    home: Path,
    warm_parent: WarmParent,
) -> StackPlan:
    """All services of one stack in `home`."""
    of_stack = {
        "SHARDLINE_DATABASE_URL": addresses.database,
        "SHARDLINE_REDIS_URL": addresses.redis,
        "SHARDLINE_HOME": str(home),
    }
    common = {**_inherited(), **of_stack}
    for_stages = {
        "SHARDLINE_KV_SHARE": f"{min(0.4, KV_SHARE_OF_HOST / len(stages)):.3f}",
        "SHARDLINE_HOP_SECRET_KEY_FILE": str(home / HOP_KEY_FILE),
        **warm_parent.environment,
        **of_stack,
    }
    services = {
        place.name: StageProcess(
            place.name,
            home,
            env={**for_stages, **of_stage(settings, place, home)},
            warm_parent=warm_parent,
        )
        for place in stages
    }
    plan = StackPlan(
        gateway=_service(
            "gateway",
            home,
            common,
            SHARDLINE_HTTP_HOST=LOOPBACK,
            SHARDLINE_HTTP_PORT=addresses.http_port,
        ),
        relay=_service("relay", home, common),
        heads=tuple(services[place.name] for place in stages if _may_lead(place)),
        others=tuple(services[place.name] for place in stages if not _may_lead(place)),
        flower=_flower(addresses, common, home),
    )
    if settings.metrics_port is not None:
        for port, service in enumerate(
            (plan.gateway, plan.relay, *plan.stages), settings.metrics_port
        ):
            service.env[METRICS_PORT] = str(port)
    return plan


def _may_lead(place: StagePlacement) -> bool:
    return place.place == 0 or place.layers is None


def _inherited() -> dict[str, str]:
    """What every service has of this process's environment."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("FLOWER_")},
        "PYTHONUNBUFFERED": "1",
    }


def _service(name: str, home: Path, common: Mapping[str, str], **own: object) -> ServiceProcess:
    env = {**common, **{key: str(value) for key, value in own.items()}}
    return ServiceProcess(name, home, argv=[sys.executable, "-m", f"services.{name}"], env=env)


def of_stage(settings: StandaloneSettings, place: StagePlacement, home: Path) -> dict[str, str]:
    """Returns what a stage's environment holds of itself."""
    own = {
        "SHARDLINE_MODEL_NAME": settings.name,
        "SHARDLINE_LAYERS": place.layers_text,
        "SHARDLINE_PLACE": place.place,
        "SHARDLINE_DTYPE": settings.dtype,
        "SHARDLINE_DEVICE": place.device,
        "SHARDLINE_DEVICE_SHARED": int(place.shared),
        "SHARDLINE_PIPELINE": f"{home.name.lstrip('.')}-{place.replica}",
        "SHARDLINE_LOCK_DIR": home / "locks",
        "SHARDLINE_RUN_DIR": socket_folder(home, "hops"),
    }
    if place.layers is None:  # each head's pipeline has the head's name
        own |= {"SHARDLINE_PIPELINE": "", "SHARDLINE_WORKER_NAME": f"{settings.name}.{place.name}"}
    return {name: str(value) for name, value in own.items()}


def _flower(addresses: Addresses, common: Mapping[str, str], home: Path) -> ServiceProcess:
    """Flower's process. The password is in its environment: a command line is visible to every user
    of the machine."""
    env = {
        **common,
        "FLOWER_BASIC_AUTH": f"{FLOWER_USER}:{addresses.flower_password}",
        "FLOWER_ADDRESS": LOOPBACK,
        "FLOWER_PORT": str(addresses.flower_port),
        "FLOWER_PERSISTENT": "false",
        "FLOWER_MAX_TASKS": str(FLOWER_MAX_TASKS),
    }
    argv = [sys.executable, "-m", "celery", "-A", "services.standalone.flower_app", "flower"]
    return ServiceProcess("flower", home, argv=argv, env=env)
