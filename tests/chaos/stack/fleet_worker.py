"""A worker beside those of a fleet that the stack supervises, restarted whenever it ends, as a
supervisor does: a worker ends for each plan that gives it other layers."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from services.standalone.plan import ServiceProcess
from tests.chaos.load.requests import MODEL
from tests.polling import within

LOOK_S = 0.5
END_S = 30.0


class FleetWorker:
    """Lives as long as its thread, which is its parent."""

    def __init__(self, name: str, folder: Path, environment: Mapping[str, str]) -> None:
        own = {
            "SHARDLINE_PIPELINE": "",
            "SHARDLINE_WORKER_NAME": f"{MODEL}.{name}",
            "SHARDLINE_LOCK_DIR": str(folder / f"locks-{name}"),
        }
        argv = [sys.executable, "-m", "services.stage"]
        self.name = name
        self.process = ServiceProcess(name, folder, argv=argv, env={**environment, **own})
        self._ending = threading.Event()
        self._patience_s = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """From now on."""
        self._thread.start()

    def end(self) -> None:
        """SIGKILL, for good."""
        self._ending.set()
        self._thread.join(END_S)

    def drain(self, patience_s: float) -> str:
        """SIGTERM, for good, and SIGKILL if it has not ended within `patience_s`; tells how it
        ended."""
        self._patience_s = patience_s
        self._ending.set()
        self._thread.join(patience_s + END_S)
        return self.process.how_it_ended()

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
        if self._patience_s:
            self.process.ask_to_end()
            within(self._patience_s, lambda: not self.process.is_running())
        self.process.kill()
