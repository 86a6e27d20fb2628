"""Reads compose.yaml as data: services with their settings, health checks and secrets. Knows no
Kubernetes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

ROOT = Path(__file__).resolve().parents[2]
SECRETS = "/run/secrets"
VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])((?:[^{}]|\$\{[^{}]*\})*))?\}")
"""`${NAME}`, `${NAME:-default}` or `${NAME:?problem}`; a default may hold one more."""
URL = re.compile(r"http://127\.0\.0\.1:(\d+)(/\w+)")
SECONDS = {"s": 1, "m": 60}
MIB = {"m": 1, "g": 1024}


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthCheck:
    """How to ask a container for its health: an HTTP route, or a command."""

    port: int | None
    path: str | None
    command: list[str]
    interval_s: int
    timeout_s: int
    start_s: int
    """The time that a start may take."""
    retries: int

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """Reads a service's `healthcheck`."""
        _, *command = document["test"]
        found = URL.search(" ".join(command))
        return cls(
            port=int(found[1]) if found else None,
            path=found[2] if found else None,
            command=command,
            interval_s=seconds(document["interval"]),
            timeout_s=seconds(document["timeout"]),
            start_s=seconds(document.get("start_period", "30s")),
            retries=document["retries"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One service of compose.yaml, with the values that .env.example gives."""

    name: str
    image: str
    args: list[str]
    environment: dict[str, str]
    secrets: list[str]
    mounts: list[tuple[str, str, bool]]
    """Source, path in the container, and whether it is read-only."""
    tmpfs: list[str]
    ports: list[int]
    stop_s: int
    health: HealthCheck | None
    replicas: int
    is_read_only: bool
    shm_mib: int | None
    memory_mib: int
    """What it may take at most; 0: no limit."""
    reserved_mib: int
    """What it surely gets."""

    @classmethod
    def of(cls, name: str, document: Mapping[str, Any]) -> Self:
        """Reads its part of compose.yaml, with all variables replaced."""
        size = document.get("shm_size")
        return cls(
            name=name,
            image=document["image"],
            args=shlex.split(document.get("command", "")),
            environment={
                key: str(value) for key, value in (document.get("environment") or {}).items()
            },
            secrets=document.get("secrets", []),
            mounts=[_mount(each) for each in document.get("volumes", [])],
            tmpfs=document.get("tmpfs", []),
            ports=[int(str(port).rpartition(":")[2]) for port in document.get("ports", [])],
            stop_s=seconds(document.get("stop_grace_period", "30s")),
            health=HealthCheck.of(document["healthcheck"]) if "healthcheck" in document else None,
            replicas=document.get("deploy", {}).get("replicas", 1),
            is_read_only=document.get("read_only", False),
            shm_mib=int(size.removesuffix("mb")) if size else None,
            memory_mib=mib(document.get("mem_limit", "0")),
            reserved_mib=mib(document.get("mem_reservation", "0")),
        )


def services() -> dict[str, Service]:
    """All services by name, as `.env.example` configures them."""
    document = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
    values = dict(
        line.split("=", 1)
        for line in (ROOT / ".env.example").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    )
    return {
        name: Service.of(name, _replaced(each, values))
        for name, each in document["services"].items()
    }


def seconds(text: str) -> int:
    """A duration such as `45s` or `10m`."""
    return int(text[:-1]) * SECONDS[text[-1]]


def mib(text: str) -> int:
    """An amount of memory such as `512m` or `1g`; `0` is none."""
    return 0 if text == "0" else int(text[:-1]) * MIB[text[-1]]


def _mount(text: str) -> tuple[str, str, bool]:
    source, path, *mode = text.split(":")
    return source, path, mode == ["ro"]


def _replaced(value: Any, values: Mapping[str, str]) -> Any:
    """The document with `${…}` replaced everywhere."""
    match value:
        case dict():
            return {key: _replaced(each, values) for key, each in value.items()}
        case list():
            return [_replaced(each, values) for each in value]
        case str():
            return _interpolated(value, values)
        case _:
            return value


def _interpolated(text: str, values: Mapping[str, str]) -> str:
    def replace(found: re.Match[str]) -> str:
        name, kind, rest = found.groups()
        value = values.get(name, "")
        return value if value or kind != "-" else _interpolated(rest, values)

    return VARIABLE.sub(replace, text)
