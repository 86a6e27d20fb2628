"""A runner that stays loaded: one workload at a time, stopped by signal while others run. Knows no
peer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Timer
from typing import Any

from tests.benchmarks.peers.measure import Served
from tests.benchmarks.peers.peer import Command, Unavailable, last_error
from tests.benchmarks.peers.workloads import Work
from tests.repository import REPOSITORY

READY_S = 600.0
WORK_S = 900.0


class Resident:
    """A process group of its own. Its stderr is in `log`."""

    def __init__(self, name: str, command: Command, log: Path) -> None:
        self.name = name
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command.argv,
                cwd=REPOSITORY,
                env=os.environ | dict(command.environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                process_group=0,
            )
        ready = self._ask(command.settings, READY_S)
        self.versions: dict[str, str] = ready["ready"]
        self.weight_bytes: int = ready.get("weight_bytes", 0)
        """0: it serves, and says none."""
        self.pause()

    def run(self, work: Work) -> Served:
        """Raises Unavailable if the runner dies, or takes longer than WORK_S."""
        self.resume()
        try:
            return Served.of(work, **self._ask(asdict(work), WORK_S))
        finally:
            self.pause()

    def read(self, ids: Sequence[int], path: Path) -> None:
        """Writes the logits of a text, float32 [ids, vocabulary]. Raises Unavailable."""
        self.resume()
        try:
            self._ask({"ids": list(ids), "path": str(path)}, WORK_S)
        finally:
            self.pause()

    def pause(self) -> None:
        """It takes no more time of the cores, whatever its threads wait for."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Undoes `pause`."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Lets it end by itself, then makes sure."""
        self.resume()
        assert self._process.stdin
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=20)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _ask(self, said: Any, limit_s: float) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        timer = Timer(limit_s, self._signal, (signal.SIGKILL,))
        timer.start()
        try:
            print(json.dumps(said), file=self._process.stdin, flush=True)
            return json.loads(self._process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError) as error:
            self._signal(signal.SIGKILL)
            raise Unavailable(
                f"{last_error(self._log.read_text())} (all of it in {self._log})"
            ) from error
        finally:
            timer.cancel()
