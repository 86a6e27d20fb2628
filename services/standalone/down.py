"""Stop a stack from outside: ask its supervisor, or clean up after one that was killed. Starts nothing."""

from __future__ import annotations

from services.standalone.home import SUPERVISOR, Home
from services.standalone.processes import wait_until_gone

STOP_MARGIN_S = 60.0


class StillRunning(RuntimeError):
    """The supervisor did not end in time."""


def stop_stack(home: Home, *, drain_s: float) -> list[str]:
    """Returns when nothing of this stack runs; names what had to be ended without its supervisor."""
    if not home.folder.exists():
        return []
    supervisor = home.alive().get(SUPERVISOR)
    if supervisor is not None:
        supervisor.terminate()
        if not wait_until_gone(supervisor, timeout_s=drain_s + STOP_MARGIN_S):
            raise StillRunning(f"the supervisor (process {supervisor.pid}) does not end; kill it and try again")
    with home.lock():
        return home.end_leftovers()
