"""Start and end child processes so that none outlives its parent. Knows no service: only command
lines and signals."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil
from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

from services.standalone.adopted import AdoptedProcess

LOG_MAX_BYTES = 20 * 2**20
TAIL_LINES = 15
REFUSED_STATUS = 2
"""Exit status of a service that refuses its settings."""

UNPRIVILEGED = "65534"
"""The uid and gid of `nobody`: Postgres refuses to run as root."""


class StartFailed(RuntimeError):
    """A child did not come up; the message tells why and ends with its log."""


class Child:
    """One child process under a name, with its log. Subclasses define how it starts; it may start
    again after its end."""

    def __init__(self, name: str, home: Path) -> None:
        self.name = name
        self.home = home.resolve()
        self.log = self.home / "logs" / f"{name}.log"
        self.process: subprocess.Popen[bytes] | AdoptedProcess | None = None
        self.stop_signal = signal.SIGTERM

    def start(self) -> None:
        """Start the process; a server returns when it answers."""
        raise NotImplementedError

    @property
    def pid(self) -> int:
        """The process that was started last."""
        assert self.process is not None, f"{self.name} was never started"
        return self.process.pid

    def is_running(self) -> bool:
        """Whether the process lives."""
        return self.process is not None and self.process.poll() is None

    def how_it_ended(self) -> str:
        """The exit status in words."""
        status = None if self.process is None else self.process.poll()
        if status is None:
            return "still running"
        return (
            f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"
        )

    def refused(self) -> bool:
        """Whether it ended because a setting can never work: starting it again does not help."""
        return self.process is not None and self.process.poll() == REFUSED_STATUS

    def ask_to_end(self) -> None:
        """Send the signal that ends it in good order. `stop` also waits."""
        if self.process is not None and self.is_running():
            self.process.send_signal(self.stop_signal)

    def stop(self, *, grace_s: float = 10.0) -> None:
        """Ask it to end, and kill it if it has not within `grace_s`."""
        self.ask_to_end()
        if self.process is not None:
            try:
                self.process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """SIGKILL to its whole process group, and wait until it is gone."""
        if self.process is not None:
            if self.is_running():
                os.killpg(self.pid, signal.SIGKILL)
            self.process.wait()

    def log_tail(self) -> str:
        """The last lines of its log."""
        return tail(self.log)


def spawn(
    argv: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    death_signal: str = "KILL",
    unprivileged: bool = False,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a child in its own session, its output appended to `log`; it gets `death_signal` if
    this thread dies.

    Call it from a thread that lives as long as the child should: Linux sends the signal when that
    thread ends.
    """
    with open_log(log) as output:
        return subprocess.Popen(
            [*child_prefix(death_signal, unprivileged=unprivileged), *argv],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=None if env is None else dict(env),
            cwd=cwd,
            # A Ctrl-C in the terminal must reach the parent only: it stops the children in order.
            start_new_session=True,
            pass_fds=pass_fds,
        )


def run(
    argv: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    unprivileged: bool = False,
) -> int:
    """Run a command to its end; its output goes to `log`. Returns the exit status."""
    return spawn(argv, log=log, env=env, cwd=cwd, unprivileged=unprivileged).wait()


def reap_orphans(own: Collection[int]) -> None:
    """Forget children that ended and are not among `own`: those that a process of ours left behind
    when it died."""
    with suppress(ChildProcessError):
        while (
            ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        ) and ended.si_pid not in own:
            os.waitpid(ended.si_pid, 0)


def is_alive(process: psutil.Process) -> bool:
    """Whether it still runs: neither gone, nor replaced by another one of the same pid, nor a
    zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(process: psutil.Process, *, timeout_s: float) -> bool:
    """Wait for a process that need not be our child. False if it still runs after `timeout_s`."""
    retrying = Retrying(
        wait=wait_fixed(0.05),
        stop=stop_after_delay(timeout_s),
        retry=retry_if_result(bool),
        retry_error_callback=lambda _: True,
    )
    return not retrying(is_alive, process)


def child_prefix(death_signal: str = "KILL", *, unprivileged: bool = False) -> list[str]:
    """The `setpriv` prefix (util-linux), empty where there is none: there, only the recorded pids
    help."""
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        return []
    prefix = [setpriv, "--pdeathsig", death_signal]
    if unprivileged and os.geteuid() == 0:
        # Files stay reachable below folders that only root may enter (a clone in /root).
        caps = ["--inh-caps", "+dac_override", "--ambient-caps", "+dac_override"]
        prefix += ["--reuid", UNPRIVILEGED, "--regid", UNPRIVILEGED, "--clear-groups", *caps]
    return prefix


def tail(log: Path) -> str:
    """The last lines of a log."""
    return (
        "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
        if log.exists()
        else ""
    )


def open_log(log: Path) -> IO[bytes]:
    """Opens it to append to, in a folder of this user alone: what servers and libraries write may
    quote what is private."""
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    log.parent.chmod(0o700)
    bound_log(log)
    log.touch(mode=0o600)
    log.chmod(0o600)
    return log.open("ab")


def bound_log(log: Path, *, max_bytes: int = LOG_MAX_BYTES) -> None:
    """Keep one older copy when a log has outgrown its limit, or what of it fits on a full disk.
    Safe while a child appends to it."""
    if log.exists() and log.stat().st_size > max_bytes:
        with suppress(OSError):
            shutil.copy(log, log.with_suffix(".log.1"))
        os.truncate(log, 0)
