"""A head's hold on its pipeline's name: epochs out of Postgres, for one living head at a time.
Knows no stage."""

from __future__ import annotations

import structlog
from sqlalchemy import Engine as Database
from sqlalchemy.exc import DBAPIError

from shardline.base.errors import Conflict, Unavailable
from shardline.store import pipelines
from shardline.store.connection.database import failure_of

log = structlog.get_logger(__name__)


class Epochs:
    """Takes epochs of the pipeline `name` for the worker `head`. Used by one thread at a time."""

    def __init__(
        self,
        database: Database,
        name: str,
        *,
        model: str,
        fingerprint: str,
        head: str,
        lease_s: float,
    ) -> None:
        self._database = database
        self._name = name
        self._model = model
        self._fingerprint = fingerprint
        self._head = head
        self._lease_s = lease_s
        self._last = 0
        """The last one taken here; 0 when that is not known."""

    def take(self) -> int:
        """The next. Raises Unavailable when Postgres is unreachable, and Conflict while another
        head holds the name."""
        holder = None
        try:
            with self._database.begin() as connection:
                epoch = pipelines.take_epoch(
                    connection,
                    self._name,
                    model=self._model,
                    fingerprint=self._fingerprint,
                    head=self._head,
                    lease_s=self._lease_s,
                    held=self._last,
                )
                if epoch is None:
                    holder = pipelines.holder(connection, self._name)
        except DBAPIError as error:
            self._last = 0  # An epoch may have been taken although its number never came.
            raise Unavailable(str(failure_of(error))) from error
        if epoch is None:
            raise Conflict(
                f"the pipeline {self._name!r} is held by the head {holder} with a current lease. "
                "Two heads cannot share a name: give each its own SHARDLINE_PIPELINE, or stop one. "
                f"If that head is dead, this one goes on within {self._lease_s:g} s"
            )
        self._last = epoch
        return epoch

    def release(self) -> None:
        """The next head of this name need not wait for the lease."""
        try:
            with self._database.begin() as connection:
                pipelines.release(connection, self._name, self._last)
        except DBAPIError as error:
            log.warning(
                "the pipeline's lease is left to run out",
                pipeline=self._name,
                error=str(failure_of(error)),
            )
