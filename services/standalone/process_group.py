"""Keeps a group of child processes running: starts them, restarts those that die (backing off),
stops them in order.

Knows no service: children, signals and time only. Everything happens in the main thread, because
children are tied to the life of the thread that started them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.standalone.processes import Child, StartFailed, bound_log
from services.standalone.signals import SignalInbox

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
CALM_S = 60.0
"""A child that ran this long has recovered: its next death resets the backoff."""

POLL_S = 0.25


@dataclass(slots=True, kw_only=True)
class WatchedChild:
    """One child and how often it died lately."""

    child: Child
    num_deaths: int = 0
    started_at: float = field(default_factory=time.monotonic)
    restart_at: float | None = None


def backoff_s(num_deaths: int) -> float:
    """Delay before the next start: none, then half a second, doubling, at most half a minute."""
    return (
        min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** min(num_deaths - 2, 16)) if num_deaths > 1 else 0.0
    )


class ProcessGroup:
    """`changed` is called with every running child's pid whenever one was started. Delays shrink by
    `time_scale`."""

    def __init__(
        self,
        inbox: SignalInbox,
        *,
        say: Callable[[str], None],
        changed: Callable[[dict[str, int]], None],
        time_scale: float = 1.0,
    ) -> None:
        self._time_scale = time_scale
        self._inbox = inbox
        self._say = say
        self._changed = changed
        self._watched: dict[str, WatchedChild] = {}

    @property
    def pids(self) -> dict[str, int]:
        """Every child that was started and has not ended."""
        return {
            name: each.child.pid for name, each in self._watched.items() if each.child.is_running()
        }

    def start(self, child: Child) -> None:
        """Start a child and keep it running from now on."""
        child.start()
        self._watched[child.name] = WatchedChild(child=child)
        self._changed(self.pids)

    def watch(self, *, max_deaths: int | None = None) -> None:
        """Wait a moment or for a signal; restart what died. Raises StartFailed for a child that
        died too often."""
        self._inbox.wait(POLL_S)
        for watched in self._watched.values():
            bound_log(watched.child.log)
            if not watched.child.is_running():
                self._handle_death(watched, max_deaths)

    def _handle_death(self, watched: WatchedChild, max_deaths: int | None) -> None:
        now = time.monotonic()
        if watched.restart_at is None:
            self._count_death(watched, now, watched.child.how_it_ended())
            if max_deaths is not None and (
                watched.num_deaths > max_deaths or watched.child.refused()
            ):
                raise StartFailed(f"{watched.child.name} cannot start:\n{watched.child.log_tail()}")
        if watched.restart_at is not None and now >= watched.restart_at:
            self._restart(watched)

    def _count_death(self, watched: WatchedChild, now: float, how: str) -> None:
        calm = now - watched.started_at > CALM_S * self._time_scale
        watched.num_deaths = 1 if calm else watched.num_deaths + 1
        delay_s = backoff_s(watched.num_deaths) * self._time_scale
        watched.restart_at = now + delay_s
        when = f"in {delay_s:g} s" if delay_s else "now"
        self._say(
            f"{watched.child.name} ended ({how}); restarting {when}. Its log: {watched.child.log}"
        )

    def _restart(self, watched: WatchedChild) -> None:
        try:
            watched.child.start()
        except (StartFailed, OSError) as error:
            self._count_death(watched, time.monotonic(), str(error))
            return
        watched.restart_at = None
        watched.started_at = time.monotonic()
        self._say(f"{watched.child.name} restarted (process {watched.child.pid})")
        self._changed(self.pids)

    def stop(self, order: Sequence[Sequence[Child]], *, grace_s: float) -> None:
        """Stop group after group. A further request to stop cuts every grace short."""
        asked = self._inbox.num_stops
        for group in order:
            deadline = time.monotonic() + grace_s
            for child in group:
                child.ask_to_end()
            while any(child.is_running() for child in group):
                if time.monotonic() > deadline or self._inbox.num_stops > asked:
                    for child in group:
                        child.kill()
                self._inbox.wait(min(POLL_S, deadline - time.monotonic()))
