"""Hears Postgres's NOTIFY for new and requeued jobs, and wakes those who look at rows. A missed one costs a poll."""

from __future__ import annotations

from services.relay.loop import Loop
from shardline.config import Times
from shardline.metrics import RelayMetrics
from shardline.store.bells import listening
from shardline.tables import JOBS_CHANNEL


class NotifyListener(Loop):
    """Keeps one connection of its own."""

    def __init__(self, *, database_url: str, wakes: tuple[Loop, ...], times: Times, metrics: RelayMetrics) -> None:
        super().__init__("notify-listener", metrics.errors)
        self._database_url = database_url
        self._wakes = wakes
        self._times = times

    def turn(self) -> float:
        """Listens until stopped, or until the connection is lost."""
        with listening(self._database_url, JOBS_CHANNEL) as bell:
            while not self._stopped.is_set():
                if bell.wait(self._times.poll_s):
                    for loop in self._wakes:
                        loop.wake()
        return 0.0
