"""A whole stack as `make up` runs it, for tests: started, looked at, hurt and ended."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil

from services.standalone.processes import is_alive, wait_until_gone
from services.standalone.state_dir import StateDir
from shardline.contract.api_key import bearer
from tests.forked import ForkedProgram
from tests.polling import until
from tests.repository import REPOSITORY


class Stack:
    """One `python -m services.standalone up` in a folder of its own, on free ports."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.home = StateDir(folder)
        self.output = folder / "output"
        self.settings = {
            "SHARDLINE_HOME": str(folder),
            "SHARDLINE_HTTP_PORT": "0",
            "SHARDLINE_FLOWER_PORT": "0",
        }
        # Measured splits differ from run to run.
        self.settings["SHARDLINE_SPLIT"] = "even"
        self.settings |= settings
        self.seen: set[psutil.Process] = set()

    def command(self, verb: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the standalone stack to its end."""
        return subprocess.run(
            self._argv(verb), **self._options(), capture_output=True, text=True, check=False
        )

    def start(self) -> None:
        """Start it and wait until it says that it is ready."""
        self.output.touch(mode=0o600)
        self.process = self._up()
        until(lambda: self.process.poll() is not None or self.home.published() is not None)
        assert self.process.poll() is None, self.output.read_text()
        self.look()

    def look(self) -> dict[str, Any]:
        """up.json; every process in it is remembered."""
        up = self.home.published()
        assert up is not None
        self.seen |= {
            psutil.Process(pid) for pid in up["processes"].values() if psutil.pid_exists(pid)
        }
        return up

    @property
    def urls(self) -> Mapping[str, str]:
        """Where producers reach it, and the `api_key` that the gateway wants."""
        up = self.look()
        return {**up["urls"], "api_key": up["api_key"]}

    def complete(self) -> httpx.Response:
        """One completion through the gateway."""
        up = self.look()
        request = {
            "model": "clerk",
            "prompt": "sort: 3, 1, 2 =",
            "temperature": 0,
            "max_tokens": 16,
        }
        url = f"{up['urls']['gateway']}/v1/completions"
        key = bearer(up["api_key"])
        return httpx.post(url, json=request, headers=key, timeout=60)

    def left(self) -> list[psutil.Process]:
        """Processes ever seen that do not end."""
        return [process for process in self.seen if not wait_until_gone(process, timeout_s=30)]

    def end(self) -> None:
        """Whatever a test left."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait()

    def _up(self) -> subprocess.Popen[bytes] | ForkedProgram:
        with self.output.open("ab") as output:
            return subprocess.Popen(
                self._argv("up"), **self._options(), stdout=output, stderr=output
            )

    def _argv(self, verb: str) -> list[str]:
        return [sys.executable, "-m", "services.standalone", verb]

    def _options(self) -> dict[str, Any]:
        return {
            "cwd": REPOSITORY,
            "env": {**os.environ, **self.settings},
            "stdin": subprocess.DEVNULL,
        }


class ForkedStack(Stack):
    """The same in seconds: its Python programs are forks of one that has imported what they
    import."""

    def _up(self) -> ForkedProgram:
        return ForkedProgram(
            ["services.standalone", "up"],
            environment={**os.environ, **self.settings},
            log=self.output,
            can_fork=True,
        )


def is_running(pid: int | None) -> bool:
    """Whether there is such a process: neither gone nor a zombie."""
    try:
        return pid is not None and is_alive(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


def no_foreign_settings() -> None:
    """What the caller's shell says of SHARDLINE_* must not reach a stack under test."""
    for name in [name for name in os.environ if name.startswith("SHARDLINE_")]:
        del os.environ[name]
