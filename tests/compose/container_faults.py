"""What operators and machines do to containers: kill, crash, pause, cut off, restart, scale. Knows
services by name."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType

from tests.chaos.faults import client_faults, message_faults, postgres_faults, redis_faults
from tests.chaos.faults.fault import Fault, NotInjected, Simple, hold
from tests.compose.compose_target import NETWORK, ComposeTarget
from tests.polling import within

ROLES: Mapping[str, str] = MappingProxyType(
    {
        "head": "stage-0",
        "tail": "stage-1",
        "relay": "relay",
        "gateway": "gateway",
        "redis": "redis",
        "postgres": "postgres",
    }
)
LEASES = (0.5, 1.5, 5.0)
AWAY_LEASES = 1.5
COMMAND_S = 120.0
"""Longer than the grace period of a container that is stopped."""
FORM_S = 60.0
AGAIN_S = 70.0
"""Docker waits up to a minute before it starts what crashes again and again."""

Inject = Callable[[ComposeTarget, random.Random], None]


def kill(service: str, away_leases: float = 0.0) -> Inject:
    """`docker kill`: Docker takes it for the operator's wish and leaves it dead, so somebody must
    start it again."""

    def inject(target: ComposeTarget, rng: random.Random) -> None:
        name = _name(target, service)
        _docker(target, "kill", name)
        try:
            hold(away_leases * target.times.lease_s)
        finally:
            _docker(target, "start", name)

    return inject


def crash(service: str) -> Inject:
    """SIGKILL of what runs inside: Docker starts the container again by its policy."""

    def inject(target: ComposeTarget, rng: random.Random) -> None:
        name = _name(target, service)
        before = target.stack.num_restarts(name)
        target.stack.kill_inside(name)
        if not within(AGAIN_S, lambda: target.stack.num_restarts(name) > before):
            raise NotInjected(f"Docker has not started {name} again within {AGAIN_S:.0f} s")

    return inject


def pause(service: str, leases: float) -> Inject:
    """`docker pause`, then `docker unpause`."""

    def inject(target: ComposeTarget, rng: random.Random) -> None:
        name = _name(target, service)
        _docker(target, "pause", name)
        try:
            hold(leases * target.times.lease_s)
        finally:
            _docker(target, "unpause", name)

    return inject


def disconnect(service: str) -> Inject:
    """Off the network for more than a lease; back at another address maybe, under the names that
    Compose gave."""

    def inject(target: ComposeTarget, rng: random.Random) -> None:
        name = _name(target, service)
        _docker(target, "network", "disconnect", NETWORK, name)
        try:
            hold(AWAY_LEASES * target.times.lease_s)
        finally:
            _docker(
                target, "network", "connect", f"--alias={service}", f"--alias={name}", NETWORK, name
            )

    return inject


def restart(service: str) -> Inject:
    """SIGTERM as a redeploy sends it; it must end by itself within its grace period."""

    def inject(target: ComposeTarget, rng: random.Random) -> None:
        name = _name(target, service)
        try:
            _docker(target, "stop", name)
            status = _docker(target, "inspect", "--format={{.State.ExitCode}}", name)
        finally:
            _docker(target, "start", name)
        if status != "0":
            raise NotInjected(f"{name} ended with {status} after SIGTERM")

    return inject


def scale(*services: str) -> Inject:
    """`docker compose up --scale`, to two and back to one."""

    def inject(target: ComposeTarget, rng: random.Random) -> None:
        try:
            target.stack.up(**{service.replace("-", "_"): 2 for service in services})
            if not within(FORM_S, lambda: target.num_pipelines() == 2 or "stage-0" not in services):
                raise NotInjected(f"no second pipeline formed within {FORM_S:.0f} s")
        finally:
            target.stack.up()

    return inject


def one_port(target: ComposeTarget) -> str:
    """In a range of ports Docker gives a container that is started again another one."""
    return (
        "producers must find the gateway at the same port after a restart, so only one is published"
    )


def _name(target: ComposeTarget, service: str) -> str:
    """Its only container."""
    (name,) = target.stack.names(service)
    return name


def _docker(target: ComposeTarget, *arguments: str) -> str:
    return target.stack.docker.run(*arguments, timeout_s=COMMAND_S).stdout.strip()


GROUPS: Mapping[str, tuple[Fault[ComposeTarget], ...]] = MappingProxyType(
    {
        "kill": (
            *(
                Simple(kind=f"docker kill {role}", inject=kill(name), is_kill=True)
                for role, name in ROLES.items()
            ),
            *(
                Simple(
                    kind=f"docker kill {role} for {AWAY_LEASES:g} leases",
                    inject=kill(ROLES[role], AWAY_LEASES),
                    is_kill=True,
                )
                for role in ("head", "redis", "postgres")
            ),
        ),
        "crash": tuple(
            Simple(kind=f"crash {role}", inject=crash(name), is_kill=True)
            for role, name in ROLES.items()
        ),
        "pause": tuple(
            Simple(kind=f"docker pause {role} {leases:g} leases", inject=pause(name, leases))
            for role, name in ROLES.items()
            for leases in LEASES
        ),
        "network": tuple(
            Simple(kind=f"network disconnect {role}", inject=disconnect(name))
            for role, name in ROLES.items()
        ),
        "deploy": (
            *(
                Simple(kind=f"docker restart {role}", inject=restart(name))
                for role, name in ROLES.items()
            ),
            Simple(kind="compose scale gateway", inject=scale("gateway"), why_not=one_port),
            Simple(kind="compose scale relay", inject=scale("relay")),
            Simple(kind="compose scale stages", inject=scale("stage-0", "stage-1")),
        ),
        "redis": (
            Simple(kind="redis: client kill", inject=redis_faults.cut),
            Simple(kind="redis: flushall", inject=redis_faults.flush),
            Simple(kind="redis: maxmemory reached", inject=redis_faults.full),
        ),
        "postgres": (
            Simple(kind="postgres: terminate backends", inject=postgres_faults.cut),
            Simple(kind="postgres: table locked", inject=postgres_faults.lock),
        ),
        "client": client_faults.FAULTS,
        "messages": message_faults.FAULTS,
    }
)
