"""Start and end child processes so that none outlives its parent. Knows no service: only command lines and signals."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

LOG_MAX_BYTES = 20 * 2**20
UNPRIVILEGED = "65534"
"""The uid and gid of `nobody`: Postgres refuses to run as root."""


def spawn(
    argv: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    death_signal: str = "KILL",
    unprivileged: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a child in its own session, its output appended to `log`; it gets `death_signal` if this thread dies.

    Call it from a thread that lives as long as the child should: Linux sends the signal when that thread ends.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    bound_log(log)
    with log.open("ab") as output:
        return subprocess.Popen(
            [*_privileges(death_signal, unprivileged=unprivileged), *argv],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=None if env is None else dict(env),
            cwd=cwd,
            # A Ctrl-C in the terminal must reach the parent only: it stops the children in order.
            start_new_session=True,
        )


def _privileges(death_signal: str, *, unprivileged: bool) -> list[str]:
    """The `setpriv` prefix (util-linux). Elsewhere there is none, and the recorded pids have to do."""
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        return []
    prefix = [setpriv, "--pdeathsig", death_signal]
    if unprivileged and os.geteuid() == 0:
        # Files stay reachable below folders that only root may enter (a clone in /root).
        caps = ["--inh-caps", "+dac_override", "--ambient-caps", "+dac_override"]
        prefix += ["--reuid", UNPRIVILEGED, "--regid", UNPRIVILEGED, "--clear-groups", *caps]
    return prefix


def run(argv: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None, unprivileged: bool = False) -> int:
    """Run a command to its end; its output goes to `log`. Returns the exit status."""
    return spawn(argv, log=log, env=env, unprivileged=unprivileged).wait()


def end(child: subprocess.Popen[bytes], *, first: signal.Signals = signal.SIGTERM, grace_s: float = 10.0) -> None:
    """Ask a child to end, and kill its whole process group if it has not within `grace_s`."""
    if child.poll() is None:
        child.send_signal(first)
        try:
            child.wait(grace_s)
        except subprocess.TimeoutExpired:
            kill(child)


def kill(child: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the child's process group, and wait until the child is gone."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def bound_log(log: Path, *, max_bytes: int = LOG_MAX_BYTES) -> None:
    """Keep one older copy when a log has outgrown its limit. Safe while a child appends to it."""
    if log.exists() and log.stat().st_size > max_bytes:
        shutil.copyfile(log, log.with_suffix(".log.1"))
        os.truncate(log, 0)
