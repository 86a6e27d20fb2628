"""Listens for NOTIFY of changed jobs or leases, and wakes the loops that read them. A missed one
costs one poll."""

from __future__ import annotations

from collections.abc import Mapping

from services.relay.loop import Loop, LoopContext
from shardline.store.connection.notify import listening


class NotifyListener(Loop):
    """Keeps one separate connection. `wakes` maps the payload of a notification to its loops: any
    other payload is of a later release."""

    def __init__(
        self,
        context: LoopContext,
        *,
        database_url: str,
        channel: str,
        wakes: Mapping[str, tuple[Loop, ...]],
    ) -> None:
        super().__init__(f"{channel}-listener", context.metrics.errors)
        self._channel = channel
        self._database_url = database_url
        self._wakes = wakes
        self._times = context.times

    def turn(self) -> float:
        """Listen until stopped, or until the connection is lost."""
        with listening(self._database_url, self._channel) as bell:
            while not self._stopped.is_set():
                words = bell.hear(self._times.poll_s)
                for word in self._wakes.keys() if words is None else set(words):
                    for loop in self._wakes.get(word, ()):
                        loop.wake()
        return 0.0
