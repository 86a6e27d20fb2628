"""Shardline under Compose, as a project of its own: built, started, scaled, asked and removed.
Knows no test's aim."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tests import polling
from tests.compose.engine import Docker, run
from tests.repository import REPOSITORY

PROJECT = "shardline-test"
MODEL = "clerk"
OWN = ("migrate", "gateway", "relay", "stage", "flower")
"""Services with an image built from docker/Dockerfile."""
PATIENCE_S = 300


until = partial(polling.until, timeout_s=PATIENCE_S, look_s=0.5)
"""Most questions start a process of Docker's."""


class Stack:
    """One Compose project on one engine."""

    def __init__(
        self,
        docker: Docker,
        folder: Path,
        *,
        project: str = PROJECT,
        overlays: Sequence[str] = (),
        **settings: str,
    ) -> None:
        """The two stages of the profile pipeline, unless the settings name another one."""
        self.secrets = folder / "secrets"
        self.docker = docker
        self.project = project
        self.label = f"com.docker.compose.project={project}"
        self._files = ("compose.yaml", *docker.overlays, *overlays)
        ours = {
            # A user's .env is for the user's own stack.
            "COMPOSE_DISABLE_ENV_FILE": "1",
            "COMPOSE_PROFILES": "pipeline",
            "SHARDLINE_MODEL_DIR": str(
                REPOSITORY / "services" / "standalone" / "demo" / "clerk" / "model"
            ),
            "SHARDLINE_MODEL_NAME": MODEL,
            "SHARDLINE_SECRETS_DIR": str(self.secrets),
            # Replicas on one machine: more stages than cores.
            "SHARDLINE_DEVICE_SHARED": "true",
            # Any free ports.
            "SHARDLINE_HTTP_PORTS": "0",
            "SHARDLINE_FLOWER_PORT": "0",
            **{f"SHARDLINE_{name.upper()}_IMAGE": self.image(name) for name in OWN},
        }
        self._environment = {**docker.environment, **ours, **settings}

    def image(self, name: str) -> str:
        """The image of one of our services in this project: another tag than a user's."""
        return f"{self.project}-{name}"

    def compose(self, *arguments: str) -> str:
        """`docker compose …`. Returns what it printed."""
        files = [part for file in self._files for part in ("-f", file)]
        command = (
            "docker",
            "compose",
            "-p",
            self.project,
            "--progress",
            "quiet",
            *files,
            *arguments,
        )
        return run(*command, env=self._environment).stdout.strip()

    def build(self) -> None:
        """The images, and the secrets. What a killed run left behind is removed first: its secrets
        were others."""
        run(str(REPOSITORY / "docker" / "secrets.sh"), str(self.secrets))
        self.compose("down", "--volumes", "--remove-orphans")
        self.compose("build")

    def up(self, **replicas: int) -> None:
        """Start what is missing, end what is too many, and wait until all is healthy."""
        self._up("--wait", "--wait-timeout", str(PATIENCE_S), **replicas)

    def scale(self, **replicas: int) -> None:
        """Start what is missing and end what is too many. A container that restarts meanwhile, as a
        worker does for a new plan, is no failure."""
        self._up(**replicas)

    def _up(self, *options: str, **replicas: int) -> None:
        scale = [f"--scale={name.replace('_', '-')}={number}" for name, number in replicas.items()]
        self.compose("up", "-d", "--no-build", *options, *scale)

    def remove(self) -> None:
        """Containers, networks, volumes and images."""
        self.compose("down", "--volumes", "--remove-orphans")
        self.docker.run("image", "rm", *(self.image(name) for name in OWN))
        self.docker.run("image", "prune", "--force", f"--filter=label={self.label}")

    def containers(self) -> list[Mapping[str, Any]]:
        """Each with `Service`, `Name`, `State`, `Health`, `ExitCode`."""
        return [
            json.loads(line)
            for line in self.compose("ps", "--all", "--format", "json").splitlines()
        ]

    def names(self, service: str) -> list[str]:
        """Of the service's containers, whatever their state."""
        filters = (
            f"--filter=label={self.label}",
            f"--filter=label=com.docker.compose.service={service}",
        )
        return self.docker.run("ps", "--all", *filters, "--format={{.Names}}").stdout.split()

    def exits(self, *, since_s: float) -> list[str]:
        """The exit status of every container that ended since then; 137 was killed."""
        options = (f"--since={since_s:.3f}", f"--until={time.time():.3f}", "--filter=event=die")
        ours = (f"--filter=label={self.label}", "--format={{.Actor.Attributes.exitCode}}")
        return self.docker.run("events", *options, *ours).stdout.split()

    @property
    def api_key(self) -> str:
        """The one that the migration has stored."""
        return (self.secrets / "api_key").read_text()

    def gateways(self) -> list[str]:
        """A URL for each."""
        ports = [
            self.docker.run("port", name, "8000/tcp").stdout.split()[0]
            for name in self.names("gateway")
        ]
        return [f"http://{port}" for port in ports]

    def flower(self) -> httpx.Client:
        """Flower's API. It is asked without credentials when `auth=None` is given with a
        request."""
        user, _, password = (self.secrets / "flower_auth").read_text().partition(":")
        return httpx.Client(
            base_url=f"http://{self.compose('port', 'flower', '5555')}", auth=(user, password)
        )

    def inside(self, service: str, *command: str) -> str:
        """Run in the service's first container."""
        return self.compose("exec", "-T", service, *command)

    def crash(self, container: str) -> None:
        """Kill whatever runs in it, and wait until Docker has started it again."""
        before = self.num_restarts(container)
        self.kill_inside(container)
        until(lambda: self.num_restarts(container) > before)

    def kill_inside(self, container: str) -> None:
        """SIGKILL to everything in it: to Docker it has crashed. What kills may be killed on its
        way out."""
        self.docker.run("exec", container, "sh", "-c", "kill -9 -1", check=False)

    def num_restarts(self, container: str) -> int:
        """How often its policy has started it again."""
        return int(self.docker.run("inspect", "--format={{.RestartCount}}", container).stdout)

    def sql(self, query: str) -> list[Sequence[str]]:
        """Rows straight from Postgres."""
        answer = self.inside(
            "postgres", "psql", "-U", "shardline", "-d", "shardline", "-AtF", "|", "-c", query
        )
        return [line.split("|") for line in answer.splitlines()]

    def number(self, query: str) -> int:
        """The only number of a query."""
        return int(self.sql(query)[0][0])
