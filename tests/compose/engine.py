"""The Docker engine of this run: one that answers already, or a stand-in that a script starts in a
folder of its own.

Owns base images and the folder of wheels where no registry of images is in reach; knows no service
of ours.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.repository import REPOSITORY

CALLERS = dict(os.environ)
"""As the caller set it, before the tests forget SHARDLINE_*."""

SCRIPT = Path(
    CALLERS.get("SHARDLINE_DOCKER_ENGINE", REPOSITORY.parent / "shared" / "tools" / "docker-engine")
)
FOLDER = Path(CALLERS.get("SHARDLINE_DOCKER_DIR", Path.home() / ".cache" / "shardline-docker"))
KINDS = ("python", "postgres", "redis")
NEEDS = (
    "`make test-compose` and `make chaos-compose` need a Docker engine with compose: start one,"
    " or name a script that starts one with `start FOLDER`, `image FOLDER KIND TAG`"
    " and `stop FOLDER` in SHARDLINE_DOCKER_ENGINE"
)


class Failed(subprocess.SubprocessError):
    """A command that ended badly, with what it said."""


def run(
    *command: str, env: Mapping[str, str] | None = None, timeout_s: float = 1800, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """A command run to its end from the repository. A failure shows what it said."""
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if check and done.returncode != 0:
        ends = f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
        raise Failed(f"{shlex.join(command)} → {done.returncode}\n{ends}")
    return done


@dataclass(frozen=True, slots=True, kw_only=True)
class Docker:
    """How to reach the engine, and with what to build there."""

    environment: Mapping[str, str]
    overlays: tuple[str, ...] = ()
    """Further Compose files, from the repository's root."""
    is_ours: bool = False
    """Started here, so ended here."""

    def run(
        self, *arguments: str, check: bool = True, timeout_s: float = 1800
    ) -> subprocess.CompletedProcess[str]:
        """`docker …`."""
        return run("docker", *arguments, env=self.environment, check=check, timeout_s=timeout_s)

    def once(self, image: str, *command: str) -> str:
        """What a command prints in a new container of `image`."""
        return self.run("run", "--rm", "--network=none", image, *command).stdout.strip()

    def stop(self) -> None:
        """End the engine, if it was started here. What it built stays in its folder, for the next
        run."""
        if self.is_ours:
            run(str(SCRIPT), "stop", str(FOLDER))


def find_or_start() -> Docker:
    """An engine that answers is taken as it is, with the official images; else the script's."""
    if _answers(CALLERS):
        return Docker(environment=CALLERS)
    assert SCRIPT.is_file(), NEEDS
    is_ours = not _answers({**CALLERS, "DOCKER_HOST": f"unix://{FOLDER}/run/docker.sock"})
    started = run(str(SCRIPT), "start", str(FOLDER)).stdout
    exports = shlex.split(started.rpartition("export ")[2])
    environment = {**CALLERS, **dict(each.split("=", 1) for each in exports)}
    docker = Docker(
        environment={
            **environment,
            **_base_images(environment),
            **_wheels(),
            "SHARDLINE_BUILD_NETWORK": "host",
        },
        overlays=("docker/compose.wheels.yaml",),
        is_ours=is_ours,
    )
    docker.run("compose", "version")
    return docker


def _answers(environment: Mapping[str, str]) -> bool:
    return (
        shutil.which("docker") is not None
        and run("docker", "info", env=environment, check=False).returncode == 0
    )


def _base_images(environment: Mapping[str, str]) -> dict[str, str]:
    tags = {kind: f"shardline-base-{kind}:test" for kind in KINDS}
    for kind, tag in tags.items():
        if run("docker", "image", "inspect", tag, env=environment, check=False).returncode != 0:
            run(str(SCRIPT), "image", str(FOLDER), kind, tag)
    return {f"SHARDLINE_{kind.upper()}_IMAGE": tag for kind, tag in tags.items()}


def _wheels() -> dict[str, str]:
    """Collected once for each version of what is asked for."""
    asked = b"".join(
        (REPOSITORY / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")
    )
    folder = FOLDER / f"wheels-{hashlib.sha256(asked).hexdigest()[:12]}"
    if not folder.is_dir():
        filling = folder.with_suffix(".new")
        run(
            str(REPOSITORY / "docker" / "wheels.sh"),
            str(filling),
            env={**os.environ, "PYTHON": sys.executable},
        )
        filling.rename(folder)
    return {"SHARDLINE_WHEELS_DIR": str(folder)}
