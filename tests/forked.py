"""Python programs as forks of a process that has imported their libraries. Each is a process like
any other, with an environment and a log of its own; only the second of its imports is saved.

What is imported before the fork keeps nothing of an environment but failpoints, which are read
anew.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Final
from unittest import mock

from services.standalone.preload import mimalloc
from services.standalone.warm_parent import ROOM
from shardline_server.host.environment import take_environment
from tests.forked_children import fork_children, run_module

LIBRARIES: Final = [
    "alembic.config",
    "celery.apps.worker",
    "celery.backends.redis",
    "celery.bin.celery",
    "celery.concurrency.thread",
    "flower.command",
    "kombu.transport.redis",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "services.gateway.app",
    "services.stage.warm_parent",
    "services.standalone.supervisor",
    "shardline.base.log",
    "shardline.store.jobs",
    "shardline_fleet.planner",
    "shardline_server.tokenize",
]
"""Of whole stacks, relays and Celery's workers."""

OF_THE_SERVER: Final = {**ROOM, "OMP_WAIT_POLICY": "passive"}
"""Read when libraries are loaded, by the process that is forked. Programs write their environment
over its room, for /proc to show."""

_FORKING = multiprocessing.get_context("forkserver")
_FORKING.set_forkserver_preload(LIBRARIES)


class ForkedProgram:
    """`python -m MODULE ARGUMENT…`, with the verbs of subprocess.Popen."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path,
        can_fork: bool = False,
    ) -> None:
        """Starts it. `can_fork`: the Python programs that a supervisor starts are forks too."""
        with mock.patch.dict(os.environ, OF_THE_SERVER, LD_PRELOAD=mimalloc()):
            forkserver.ensure_running()
        self._process = _FORKING.Process(
            target=_run, args=(list(argv), dict(environment), log, can_fork), daemon=not can_fork
        )
        self._process.start()

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None
        return pid

    def poll(self) -> int | None:
        """Its exit status, negative if a signal ended it; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Until it has ended; its exit status. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """As a supervisor does."""
        os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()


def _run(argv: Sequence[str], environment: Mapping[str, str], log: Path, can_fork: bool) -> None:
    """In the fork."""
    with log.open("ab") as output, Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    take_environment(environment)
    if can_fork:
        fork_children()
    run_module(argv)
