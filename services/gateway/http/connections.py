"""The open connections of one gateway: how many there may be, and how long each may wait. Knows no
HTTP.

A gateway has a file for each connection. When they are used up nothing can connect, health checks
included, so the oldest silent one must go before the last file is taken.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import structlog

log = structlog.get_logger(__name__)

SWEEP_S = 1.0
"""At most, between two looks at the connections that are overdue."""

LOG_EVERY_S = 10.0
"""At least, between two log lines about closed connections: an attack must not fill the log."""


class Closable(Protocol):
    """What the limits need to know of a connection."""

    def expire_head(self) -> None:
        """Answer that the head of the request did not come in time, and close."""

    def abort(self) -> None:
        """Close at once, and drop what was not sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of the connections of one process."""

    max_open: int
    head_timeout_s: float
    write_timeout_s: float


class WaitingConnections:
    """Connections that wait for one thing, the longest wait first."""

    def __init__(self) -> None:
        self._since: OrderedDict[Closable, float] = OrderedDict()

    def add(self, connection: Closable) -> None:
        """Count the wait from now, unless it has begun."""
        if connection not in self._since:
            self._since[connection] = asyncio.get_running_loop().time()

    def discard(self, connection: Closable) -> None:
        """Its wait is over, if there was one."""
        self._since.pop(connection, None)

    def pop_longest(self) -> Closable | None:
        """Take out the connection that has waited the longest."""
        return self._since.popitem(last=False)[0] if self._since else None

    def pop_overdue(self, timeout_s: float) -> Iterator[Closable]:
        """Take out those that have waited for longer than `timeout_s`."""
        began_s = asyncio.get_running_loop().time() - timeout_s
        while self._since and next(iter(self._since.values())) <= began_s:
            yield self._since.popitem(last=False)[0]


class ConnectionRegister:
    """Every open connection reports here what it waits for. All calls come from the event loop."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.heads = WaitingConnections()
        """Those without a whole request head: since they connected, or since its first byte."""
        self.idle = WaitingConnections()
        """Those between two requests."""
        self.writing = WaitingConnections()
        """Those with a reader that takes nothing from a full buffer."""
        self._limits = limits
        self._open: set[Closable] = set()
        self._closed: Counter[str] = Counter()
        self._count: Callable[[str], None] = lambda _reason: None
        self._sweeping: asyncio.Task[None] | None = None

    def start(self, count: Callable[[str], None]) -> None:
        """Begin to close what is overdue; `count` gets the reason of each connection closed."""
        self._count = count
        self._sweeping = asyncio.create_task(self._sweep(), name="connection sweep")

    def stop(self) -> None:
        """End the sweep."""
        if self._sweeping is not None:
            self._sweeping.cancel()

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, connection: Closable) -> bool:
        """Count a new connection; False when none can make room for it. The one that has waited the
        longest for its head makes room, else the one that is idle the longest: no request is
        cut."""
        if len(self._open) >= self._limits.max_open:
            waiting = self.heads.pop_longest() or self.idle.pop_longest()
            self.note_closed("limit")
            if waiting is None:
                return False
            self.closed(waiting)
            waiting.abort()
        self._open.add(connection)
        self.heads.add(connection)
        return True

    def closed(self, connection: Closable) -> None:
        """Forget a connection."""
        self._open.discard(connection)
        for waiting in (self.heads, self.idle, self.writing):
            waiting.discard(connection)

    def note_closed(self, reason: str) -> None:
        """Count a connection that the gateway closes, by reason."""
        self._closed[reason] += 1
        self._count(reason)

    async def _sweep(self) -> None:
        every_s = min(SWEEP_S, self._limits.head_timeout_s / 4, self._limits.write_timeout_s / 4)
        loop = asyncio.get_running_loop()
        logged_s = loop.time() - LOG_EVERY_S
        while True:
            await asyncio.sleep(every_s)
            for connection in self.heads.pop_overdue(self._limits.head_timeout_s):
                self.note_closed("head_timeout")
                connection.expire_head()
            for connection in self.writing.pop_overdue(self._limits.write_timeout_s):
                self.note_closed("write_timeout")
                connection.abort()
            if self._closed and loop.time() - logged_s >= LOG_EVERY_S:
                log.warning("connections closed by their limits", open=len(self), **self._closed)
                self._closed.clear()
                logged_s = loop.time()
