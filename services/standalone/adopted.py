"""A child that another process forked for this one. Knows what `subprocess.Popen` would, but starts
nothing."""

from __future__ import annotations

import os
import select
import signal
import subprocess


class AdoptedProcess:
    """The part of Popen that a Child needs. The process must be a child of this one: see
    `adopt_orphans`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """Its exit status, negative for the signal that killed it; None while it runs."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, once it has ended. Raises subprocess.TimeoutExpired after `timeout`
        seconds."""
        if self.poll() is None:
            end = os.pidfd_open(self.pid)
            try:
                select.select([end], [], [], timeout)
            finally:
                os.close(end)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        """A process that has ended gets none."""
        if self.poll() is None:
            os.kill(self.pid, number)
