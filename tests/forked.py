"""Python programs as forks of a process that has imported their libraries. Each is a process like
any other, with an environment and a log of its own; only the second of its imports is saved.

What is imported before the fork reads no environment of a program: none of our settings, no
failpoint, no Celery app.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.repository import REPOSITORY

LIBRARIES: Final = [
    "celery.apps.worker",
    "celery.backends.redis",
    "celery.bin.celery",
    "celery.concurrency.thread",
    "kombu.transport.redis",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "shardline.base.log",
    "shardline.store.jobs",
    "shardline_fleet.planner",
    "shardline_server.tokenize",
]
"""Of relays and of Celery's workers."""

_FORKING = multiprocessing.get_context("forkserver")
_FORKING.set_forkserver_preload(LIBRARIES)


class ForkedProgram:
    """`python -m MODULE ARGUMENT…`, with the verbs of subprocess.Popen."""

    def __init__(self, argv: Sequence[str], *, environment: Mapping[str, str], log: Path) -> None:
        self._process = _FORKING.Process(
            target=_run, args=(list(argv), dict(environment), log), daemon=True
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

    def wait(self, timeout: float) -> int:
        """Until it has ended; its exit status. Raises TimeoutError."""
        self._process.join(timeout)
        status = self.poll()
        if status is None:
            raise TimeoutError(f"process {self.pid} runs after {timeout:g} s")
        return status

    def send_signal(self, number: int) -> None:
        """As a supervisor does."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()


def _run(argv: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    """In the fork."""
    with log.open("wb") as output:
        for descriptor in (sys.stdout.fileno(), sys.stderr.fileno()):
            os.dup2(output.fileno(), descriptor)
    os.chdir(REPOSITORY)
    os.environ.clear()
    os.environ.update(environment)
    module, *arguments = argv
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
