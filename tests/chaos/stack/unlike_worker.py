"""A worker of another dtype beside those of a fleet, started anew whenever it ends, as a supervisor
does."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from services.standalone.plan import ServiceProcess
from tests.chaos.load.requests import MODEL

LOOK_S = 0.5
END_S = 30.0


class UnlikeWorker:
    """Lives as long as its thread, which is its parent."""

    def __init__(
        self, name: str, folder: Path, environment: Mapping[str, str], *, dtype: str
    ) -> None:
        own = {
            "SHARDLINE_DTYPE": dtype,
            "SHARDLINE_WORKER_NAME": f"{MODEL}.{name}",
            "SHARDLINE_LOCK_DIR": str(folder / f"locks-{name}"),
        }
        argv = [sys.executable, "-m", "services.stage"]
        self.name = name
        self.process = ServiceProcess(name, folder, argv=argv, env={**environment, **own})
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """From now on."""
        self._thread.start()

    def end(self) -> None:
        """SIGKILL, for good."""
        self._ending.set()
        self._thread.join(END_S)

    def relatives(self) -> set[psutil.Process]:
        """Its process and what that has started."""
        with suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.process.pid)
            return {own, *own.children(recursive=True)}
        return set()

    def _run(self) -> None:
        self.process.start()
        while not self._ending.wait(LOOK_S):
            if not self.process.is_running():
                self.process.start()
        self.process.kill()
