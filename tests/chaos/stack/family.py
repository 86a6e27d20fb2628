"""The processes of a stack on this machine: their memory, their children, and who outlives it. Asks
the system."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from tests.chaos.load.target import Running
from tests.chaos.report.finding import Finding


def running(pids: Mapping[str, int]) -> dict[str, Running]:
    """Those of these processes that live."""
    found = {}
    for name, pid in pids.items():
        with suppress(psutil.NoSuchProcess):
            found[name] = Running(pid=pid, rss_bytes=psutil.Process(pid).memory_info().rss)
    return found


def family(pids: Collection[int], seen: Collection[psutil.Process]) -> set[psutil.Process]:
    """The processes that a stack has, with their children, and those that it was ever seen to
    have."""
    own = [psutil.Process(pid) for pid in pids]
    return {*seen, *own, *(child for process in own for child in process.children(recursive=True))}


def orphans(folder: Path, seen: set[psutil.Process]) -> list[Finding]:
    """I5: processes ever seen, or with this stack's folder in their environment, that live on."""
    left = {
        process
        for process in seen
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    }
    left |= {process for process in psutil.process_iter() if _is_of(process, folder)}
    return [
        Finding(invariant="I5", count="orphans", what=f"process {process} lives on")
        for process in left
    ]


def _is_of(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.environ().get("SHARDLINE_HOME") == str(folder)
    except psutil.Error:
        return False
