"""Measures the devices of a stack side by side, as they will work. Knows no plan."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Thread

from services.standalone import processes
from services.standalone.processes import StartFailed
from services.standalone.settings import REPOSITORY
from shardline_costs import DeviceProfile, read_profiles

ARGV = [sys.executable, "-m", "services.stage", "profile", "--together"]


class Measuring:
    """One `python -m services.stage profile` for each device. They begin together, once all have
    loaded."""

    def __init__(self, environments: Sequence[Mapping[str, str]], home: Path) -> None:
        """Starts them, with their logs in `home`."""
        self._logs = [home / "logs" / f"profile-{place}.log" for place in range(len(environments))]
        self._processes = [
            _start(log, env) for log, env in zip(self._logs, environments, strict=True)
        ]
        self._answers: list[bytes] = []
        self._failed: Path | None = None
        self._thread = Thread(target=self._talk, name="measuring", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether all have answered, or one has failed."""
        return not self._thread.is_alive()

    def profiles(self) -> list[DeviceProfile]:
        """Waits for all of them; returns what was measured, in the order of the environments.

        Raises StartFailed with the log of the first process that failed.
        """
        self._thread.join()
        if self._failed is not None:
            raise StartFailed(f"{self._failed.stem} failed:\n{processes.tail(self._failed)}")
        return [profile for answer in self._answers for profile in read_profiles(answer)]

    def end(self) -> None:
        """Ends what still runs."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._thread.join()

    def _talk(self) -> None:
        pipes = [
            (process.stdin, process.stdout, log)
            for process, log in zip(self._processes, self._logs, strict=True)
        ]
        for _, out, log in pipes:
            if out is None or out.readline() != b"ready\n":
                self._failed = log
                return
        for into, _, _ in pipes:
            if into is not None:
                into.write(b"\n")
                into.close()
        for _, out, log in pipes:
            self._answers.append(out.read() if out is not None else b"")
            if not self._answers[-1]:
                self._failed = log


def _start(log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """One that ends with this process and talks through pipes; its errors go to the log."""
    with processes.open_log(log) as errors:
        return subprocess.Popen(
            [*processes.child_prefix(), *ARGV],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=dict(environment),
            cwd=REPOSITORY,
            start_new_session=True,
        )
