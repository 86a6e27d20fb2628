"""Rings when some job has ended: the LISTEN connection of a client whose threads wait. Knows no job."""

from __future__ import annotations

import time

import psycopg

from shardline.store.bells import listen
from shardline.tables import DONE_CHANNEL

RETRY_S = 0.2


class Bell:
    """For one thread at a time. Connects at the first wait, which returns at once: what ended before LISTEN was heard
    by nobody."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._connection: psycopg.Connection[tuple[object, ...]] | None = None

    def wait(self, timeout_s: float) -> None:
        """Until it rings, at most `timeout_s`; without Postgres a little while."""
        try:
            if self._connection is None:
                self._connection = psycopg.connect(self._address, autocommit=True, connect_timeout=5)
                self._connection.execute(listen(DONE_CHANNEL))
                return
            for _ in self._connection.notifies(timeout=timeout_s, stop_after=1):
                return
        except (psycopg.Error, OSError):
            self.close()
            time.sleep(min(RETRY_S, timeout_s))

    def close(self) -> None:
        """Give the connection back."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
