"""Every setting of a service reaches it under Compose, and so under Kubernetes; or here is why
not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from prometheus_client import start_http_server

from docker.kubernetes.compose import services
from services.gateway.settings import GatewaySettings
from services.relay.settings import RelaySettings
from services.stage.settings import StageSettings
from shardline.base.config import ENV_PREFIX, Settings
from tests.repository import REPOSITORY

SETTINGS = (REPOSITORY / "docs/reference/settings.md").read_text(encoding="utf-8")
COMPOSE = (REPOSITORY / "compose.yaml").read_text(encoding="utf-8")
EXAMPLE = (REPOSITORY / ".env.example").read_text(encoding="utf-8")

FLEET = ("stage", "stage-cuda", "stage-rocm")
BY_HAND = ("stage-0", "stage-1")
TABLES = {
    "All services and the client": ("gateway", "relay", *FLEET, *BY_HAND),
    "Gateway": ("gateway",),
    "Relay": ("relay",),
    "Stage": (*FLEET, *BY_HAND),
}
"""Each heading of the page of settings with the services that read its table."""

NOT_FROM_OUTSIDE = {
    "SHARDLINE_ADAPTERS_DIR": "a folder that an overlay mounts, and names",
    "SHARDLINE_CACHE_DIR": "a folder of the image",
    "SHARDLINE_DEVICE": (
        "which one is what tells the services of stages apart; those by hand have a variable each"
    ),
    "SHARDLINE_DEVICE_MODULE": "a further kind of device needs a service of its own",
    "SHARDLINE_HOP_BIND": "a container has its own network",
    "SHARDLINE_HOP_HOST": "the container's name, or the pod's address",
    "SHARDLINE_HOP_INSECURE": "`make secrets` makes the key",
    "SHARDLINE_HOP_TRANSPORT": "between containers there is only tcp",
    "SHARDLINE_HTTP_HOST": "a container listens on all of its addresses",
    "SHARDLINE_HTTP_PORT": "one in the container; SHARDLINE_HTTP_PORTS are those of the host",
    "SHARDLINE_KERNEL_DIR": "a folder of the image",
    "SHARDLINE_LAYERS": "a fleet's are planned, those by hand have SHARDLINE_SPLIT",
    "SHARDLINE_LOCK_DIR": "a folder of the image",
    "SHARDLINE_METRICS_PORT": "health checks, Prometheus and policies know the one",
    "SHARDLINE_MODEL": "where SHARDLINE_MODEL_DIR is mounted",
    "SHARDLINE_MODEL_REVISION": "a folder has none",
    "SHARDLINE_NUM_STAGES": "as many as there are services by hand",
    "SHARDLINE_PIPELINE": "one name for each head: replicas of a service would share it",
    "SHARDLINE_PLACE": "what tells the services by hand apart",
    "SHARDLINE_PROFILE": "Compose reads such a file with --env-file",
    "SHARDLINE_RUN_DIR": "a folder of the image",
    "SHARDLINE_WORKER_NAME": "the container's name tells workers apart",
}
NOT_OF_THE_FLEET = {"SHARDLINE_SPLIT": "its plan cuts the layers"}
NOT_BY_HAND = {"SHARDLINE_FURTHER_MODELS": "only workers of a fleet change models"}
NOT_BEHIND_THE_HEAD = {"SHARDLINE_DATABASE_URL": "stages behind the head never talk to Postgres"}


def left_out(service: str) -> set[str]:
    """Settings with a reason not to reach it from outside."""
    found = set(NOT_FROM_OUTSIDE)
    found |= set(NOT_OF_THE_FLEET) if service in FLEET else set()
    found |= set(NOT_BY_HAND) if service in BY_HAND else set()
    return found | (set(NOT_BEHIND_THE_HEAD) if service == "stage-1" else set())


def documented(heading: str) -> list[str]:
    """Settings in the table under a heading."""
    _, _, rest = SETTINGS.partition(f"\n## {heading}\n")
    return re.findall(r"^\| `(SHARDLINE_\w+)` \|", rest.partition("\n##")[0], re.MULTILINE)


def passed(service: str) -> set[str]:
    """Settings that reach it from outside: from a variable of the same name, or from a secret's
    file."""
    environment: dict[str, str] = yaml.safe_load(COMPOSE)["services"][service]["environment"]
    plain = {
        name
        for name, value in environment.items()
        if str(value).startswith((f"${{{name}:-", f"${{{name}:?"))
    }
    files = {name for name, value in environment.items() if str(value).startswith("/run/secrets/")}
    return plain | {name.removesuffix("_FILE") for name in files}


@pytest.mark.parametrize(
    ("service", "heading"),
    [(service, heading) for heading, readers in TABLES.items() for service in readers],
)
def test_every_documented_setting_reaches_its_service_or_says_why_not(
    service: str, heading: str
) -> None:
    settings = set(documented(heading))
    assert settings
    assert settings - passed(service) == settings & left_out(service)


def test_no_table_of_services_is_passed_over() -> None:
    of_services = SETTINGS.partition("\n## `make up`\n")[0]
    assert re.findall(r"^## (.+)$", of_services, re.MULTILINE) == list(TABLES)


def test_only_documented_settings_have_a_reason() -> None:
    reasons = {**NOT_FROM_OUTSIDE, **NOT_OF_THE_FLEET, **NOT_BY_HAND, **NOT_BEHIND_THE_HEAD}
    assert reasons.keys() - {name for heading in TABLES for name in documented(heading)} == set()


def test_compose_reads_all_that_the_example_sets() -> None:
    unread = [
        name
        for name in re.findall(r"^(\w+)=", EXAMPLE, re.MULTILINE)
        if f"${{{name}:" not in COMPOSE
    ]
    assert unread == ["COMPOSE_PROFILES"]


@pytest.mark.parametrize(
    ("service", "kind", "own"),
    [
        ("gateway", GatewaySettings, {"http_host", "http_port"}),
        ("relay", RelaySettings, set()),
        (
            "stage",
            StageSettings,
            {"model", "layers", "device", "worker_name", "stage_cores", "hop_transport"},
        ),
    ],
)
def test_what_nobody_sets_has_the_default_of_the_service(
    service: str,
    kind: type[Settings],
    own: set[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name, value in services()[service].environment.items():
        monkeypatch.setenv(name, value)
    for name in ("database_url", "redis_url", "hop_secret_key"):
        secret = tmp_path / name
        secret.write_text({"redis_url": "redis://:sesame@redis:6379/0"}.get(name, "sesame"))
        monkeypatch.setenv(f"{ENV_PREFIX}{name.upper()}_FILE", str(secret))
    settings = kind()
    theirs = own | {
        "database_url",
        "redis_url",
        "hop_secret_key",
        "log_format",
        "metrics_port",
        "model_name",
    }
    for name, field in kind.model_fields.items():
        if name not in theirs and field.default_factory is None:
            assert getattr(settings, name) == field.default, name
    assert settings.redis_url == "redis://:sesame@redis:6379/0"
    assert "retention_days" not in settings.model_fields_set


def test_health_checks_ask_no_proxy() -> None:
    server, thread = start_http_server(0)
    checks = {
        name: check["test"][2:]
        for name, service in yaml.safe_load(COMPOSE)["services"].items()
        if (check := service.get("healthcheck")) and check["test"][1] == "python"
    }
    assert checks.keys() > {"gateway", "relay", "stage", "flower"}
    for option, script in checks.values():
        ours = re.sub(r"127\.0\.0\.1:\d+", f"127.0.0.1:{server.server_port}", script)
        environment = os.environ | {"http_proxy": "http://127.0.0.1:1"}
        subprocess.run([sys.executable, option, ours], env=environment, check=True)
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("server", ["postgres", "redis"])
def test_an_overlay_may_leave_out_a_server(server: str) -> None:
    depends = {
        name: service["depends_on"][server]
        for name, service in yaml.safe_load(COMPOSE)["services"].items()
        if server in service.get("depends_on", {})
    }
    assert depends
    assert {each["required"] for each in depends.values()} == {False}
