"""A process that lost a thread must not live on, deaf or dumb: it ends, and its supervisor starts a
new one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import structlog

log = structlog.get_logger(__name__)

Result = TypeVar("Result")

SPIN_COUNT = 3_000
"""0.05 to 0.2 ms. OpenMP's own 300,000 turns outlast a time slice of another process: while that
has the core of one thread, the others would keep theirs and compute nothing."""


def spin_environment(environment: Mapping[str, str], *, are_cores_shared: bool) -> dict[str, str]:
    """What else the environment of a process needs, so that its compute threads wait asleep on
    cores that others need too, and awake only briefly on their own. Nothing where somebody chose.
    OpenMP reads it when it is loaded."""
    if "OMP_WAIT_POLICY" in environment or "GOMP_SPINCOUNT" in environment:
        return {}
    if are_cores_shared:
        return {"OMP_WAIT_POLICY": "passive"}
    return {"GOMP_SPINCOUNT": str(SPIN_COUNT)}


def stand_back(nice: int, *, thread: int = 0) -> None:
    """Gives a thread, by default the calling one, and those that it starts later at least this nice
    value; only root can take it back."""
    os.setpriority(os.PRIO_PROCESS, thread, max(nice, os.getpriority(os.PRIO_PROCESS, thread)))


HUNG_STATUS = 70
"""Exit status of a process that was asked to exit or lost a thread; the supervisor restarts it."""


def die(reason: str) -> None:
    """The process cannot go on: leave at once."""
    log.critical("this process exits", reason=reason)
    os._exit(HUNG_STATUS)


def num_threads() -> int:
    """Counts the threads of this process, also those of libraries. A process with one alone may
    fork and go on in both."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def run_in_fresh_thread(run: Callable[[], Result]) -> Result:
    """Returns what it returns, and raises what it raises, in a separate thread, which ends.

    For what computes before the thread that computes from then on: OpenMP keeps helpers for each
    thread that ever computed, and lets those of all sleep at once, instead of waiting awake, if
    they are more than cores.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def die_with_any_thread() -> None:
    """Makes whatever ends a thread, also what is no Exception, end the process."""
    threading.excepthook = _die


def _die(args: threading.ExceptHookArgs) -> None:
    name = args.thread.name if args.thread else ""
    log.critical(
        "a thread failed", thread=name, exc_info=(args.exc_type, args.exc_value, args.exc_traceback)
    )
    die(f"the thread {name} failed")
