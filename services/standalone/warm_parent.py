"""The supervisor's end of the warm parent: starts it, and has stages forked of it. Knows no stage's
settings.

A stage is forked only by a parent with an environment that agrees with its own, but for
SHARDLINE_*: libraries read the rest when they are imported. In every other case the caller starts
the stage as a new program.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from services.standalone.adopted import AdoptedProcess
from services.standalone.processes import Child, open_log, spawn
from services.standalone.settings import REPOSITORY
from shardline.base.config import ENV_PREFIX
from shardline_server.host.fork_request import GO, MAX_BYTES, READY, ForkRequest
from shardline_server.host.prctl import adopt_orphans

FORK_S = 5.0
"""Until a fork has reported its pid: milliseconds, unless the machine is starved. Later ones end by
themselves."""
PID_MAX_BYTES = 16
ROOM = {"SHARDLINE_ROOM": "." * 16_384}
"""Its stages write their own environment over that of the warm parent, for /proc to show; theirs is
larger."""


class WarmParent(Child):
    """One process for all stages of a stack. Its stages are children of this process, and live on
    when it dies."""

    def __init__(self, home: Path, environment: Mapping[str, str]) -> None:
        super().__init__("warm-parent", home)
        self.environment = dict(environment)
        self.problem = ""
        """Why it cannot fork, if it has reported a reason."""
        self._link: socket.socket | None = None
        self._is_ready = False

    def start(self) -> None:
        """Start its imports, which take seconds."""
        adopt_orphans()
        self._close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = spawn(
                [sys.executable, "-m", "services.stage.warm_parent", str(theirs.fileno())],
                log=self.log,
                env={**self.environment, **ROOM},
                cwd=REPOSITORY,
                pass_fds=(theirs.fileno(),),
            )
        ours.settimeout(0)
        self._link = ours

    def is_settled(self) -> bool:
        """Whether it has imported everything: stages are forked of it from now on, unless it has a
        `problem`."""
        if self._link is not None and not self._is_ready and not self.problem:
            try:
                received = self._link.recv(MAX_BYTES)
            except BlockingIOError:
                received = b""
            self._is_ready = received == READY
            self.problem = "" if self._is_ready else received.decode()
        return self._is_ready or bool(self.problem)

    def fork(self, name: str, environment: Mapping[str, str], log: Path) -> AdoptedProcess | None:
        """A new stage, in a separate session, its output appended to `log`. None if this parent
        cannot fork it."""
        if (
            not self.is_settled()
            or self.problem
            or not self.suits(environment)
            or self._link is None
        ):
            return None
        ours, theirs = socket.socketpair()
        with ours, open_log(log) as output:
            try:
                with theirs:
                    ForkRequest(
                        name=name,
                        environment=environment,
                        log=output.fileno(),
                        answer=theirs.fileno(),
                    ).send(self._link)
                ours.settimeout(FORK_S)
                pid = ours.recv(PID_MAX_BYTES)
                ours.send(GO)
            except OSError:
                return None
        return AdoptedProcess(int(pid)) if pid else None

    def suits(self, environment: Mapping[str, str]) -> bool:
        """Whether a stage with this environment may be its fork."""
        return _of_libraries(environment) == _of_libraries(self.environment)

    def _close(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link = None
        self._is_ready = False
        self.problem = ""


def _of_libraries(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(ENV_PREFIX)}
