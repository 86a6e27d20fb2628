"""Stop a stack from outside: ask its supervisor, or clean up after one that was killed. Starts
nothing."""

from __future__ import annotations

from services.standalone.processes import wait_until_gone
from services.standalone.state_dir import SUPERVISOR, StateDir

STOP_MARGIN_S = 60.0


class StillRunning(RuntimeError):
    """The supervisor did not end in time."""


def stop_stack(state_dir: StateDir, *, drain_s: float) -> list[str]:
    """Returns when nothing of this stack runs; names what had to be ended without its
    supervisor."""
    if not state_dir.folder.exists():
        return []
    supervisor = state_dir.alive().get(SUPERVISOR)
    if supervisor is not None:
        supervisor.terminate()
        if not wait_until_gone(supervisor, timeout_s=drain_s + STOP_MARGIN_S):
            raise StillRunning(
                f"the supervisor (process {supervisor.pid}) does not end; kill it and try again"
            )
    with state_dir.lock():
        return state_dir.end_leftovers()
