"""What a peer is to the benchmark, and the environment it is installed into. Knows no peer by
name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tests.benchmarks.model import make
from tests.repository import REPOSITORY

CACHE = Path.home() / ".cache" / "shardline-bench"
PEERS = CACHE / "peers"
CONTEXT = 2048
"""Tokens: the longest workload has 1,564."""
KV_GIB = 2
"""Of every engine, all loaded at once: the 53,000 tokens of the largest workload take 1.3 GiB in
bf16."""
NUM_CORES = len(os.sched_getaffinity(0))
CHECKPOINTS = {"bf16": "bfloat16", "fp32": "float32", "int8": "bfloat16", "int4": "bfloat16"}
"""The dtype of the checkpoint that a precision is computed from."""
Checkpoint = Callable[[str], Path]
"""Gives the folder of the model for a precision."""


class Unavailable(Exception):
    """A peer that cannot be installed, converted for or started here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """How a runner is started, and the first line it is told."""

    module: str
    settings: Mapping[str, Any]
    python: Path = Path(sys.executable)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def argv(self) -> list[str]:
        """Its command line, in the repository's folder."""
        return [str(self.python), "-m", f"tests.benchmarks.peers.runners.{self.module}"]


class Peer(Protocol):
    """One system. All of it is kept for the next run."""

    name: str
    precisions: tuple[str, ...]

    def install(self) -> None:
        """Makes its environment. Raises Unavailable."""

    def convert(self, precision: str) -> None:
        """Writes the model as the peer wants it. Raises Unavailable."""

    def command(self, precision: str) -> Command:
        """Its runner, with the peer's best settings."""


class LogitsPeer(Peer, Protocol):
    """A peer whose logits can be seen."""

    def reader(self, precision: str) -> Command:
        """Its runner that reads windows of a text."""


class Environment:
    """A virtual environment below PEERS, with a log of what was done there."""

    def __init__(self, name: str) -> None:
        self.folder = PEERS / name
        self.python = self.folder / "bin" / "python"
        self._log = PEERS / f"{name}.log"

    def provide(
        self, *packages: str, with_torch: bool = False, without: Sequence[str] = ()
    ) -> None:
        """Makes it, once for each list of packages; takes away what they bring and what does not
        load here."""
        self.create()
        done = self.once("installed", "\n".join(packages))
        if done.is_there:
            return
        if with_torch:
            self.install_torch()
        self.install(*packages)
        if without:
            self.uninstall(*without)
        done.leave()

    def create(self) -> None:
        """Makes it, with torch's release of this project as the only one pip may take there."""
        if not self.python.exists():
            PEERS.mkdir(parents=True, exist_ok=True)
            self.call([sys.executable, "-m", "venv", str(self.folder)])
            self.pip("install", "--upgrade", "pip")
        self._constraints.write_text(f"{torch_release()}\n")

    def pip(self, *arguments: str) -> None:
        """Raises Unavailable with pip's last line."""
        self.call([str(self.python), "-m", "pip", "--disable-pip-version-check", *arguments])

    def install(self, *packages: str) -> None:
        """Packages, under the constraint."""
        self.pip("install", "-c", str(self._constraints), *packages)

    def install_torch(self) -> None:
        """The CPU build, alone and first: a resolver that is free to choose takes gigabytes of
        another one."""
        index = os.environ.get("TORCH_INDEX")
        self.install(*(("--index-url", index) if index else ()), torch_release())

    def uninstall(self, *packages: str) -> None:
        """Those that are there."""
        self.pip("uninstall", "-y", *packages)

    def call(self, argv: Sequence[str], folder: Path | None = None) -> None:
        """One command, its output in the log. Raises Unavailable with the last line that names an
        error."""
        with self._log.open("a+") as log:
            log.write(f"$ {' '.join(argv)}\n")
            log.flush()
            start = log.tell()
            offline = os.environ | {"HF_HUB_OFFLINE": "1"}
            code = subprocess.run(
                argv, cwd=folder or REPOSITORY, env=offline, stdout=log, stderr=log, check=False
            )
            if code.returncode:
                log.seek(start)
                raise Unavailable(f"{last_error(log.read())} (all of it in {self._log.name})")

    def once(self, name: str, text: str) -> Stamp:
        """A step that is done once for each `text`."""
        return Stamp(self.folder / f".{name}", text)

    @property
    def _constraints(self) -> Path:
        return self.folder / "constraints.txt"


@dataclass(frozen=True, slots=True)
class Stamp:
    """A file that says what was done."""

    path: Path
    text: str

    @property
    def is_there(self) -> bool:
        """Whether the step was done, with the same text."""
        return self.path.exists() and self.path.read_text() == self.text

    def leave(self) -> None:
        """After the step."""
        self.path.write_text(self.text)


def torch_release() -> str:
    """`torch==…`, as the project pins it."""
    found = re.search(r"^torch==\S+", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)
    assert found
    return found[0]


def last_error(text: str) -> str:
    """The last line that names an error, else the last line, without terminal colors; at most 200
    characters."""
    lines = [
        line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()
    ]
    named = [line for line in lines if re.search(r"error|not |unsupported", line, re.IGNORECASE)]
    return (named or lines or ["no output"])[-1][:200]


def model(precision: str) -> Path:
    """The checkpoint for a precision, made if it is not there."""
    return make(CACHE, CHECKPOINTS[precision], CONTEXT)
