"""What a head is in the present epoch, and the row of its pipeline that says so. Knows no jobs.

The row follows what is so: `ready` and `lost` come from the pipeline's thread, the ledger's writes them down.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sqlalchemy import Engine as Database

from services.stage.jobs.identity import Identity
from shardline.config import Times
from shardline.store import pipelines


class PipelineReadiness:
    """`on_announced`: Postgres knows that the pipeline is ready. `on_superseded`: another head took its epoch."""

    def __init__(
        self,
        database: Database,
        *,
        seats: int,
        times: Times,
        on_announced: Callable[[], None],
        on_superseded: Callable[[int], None],
    ) -> None:
        self._database = database
        self._seats = seats
        self._times = times
        self._on_announced = on_announced
        self._on_superseded = on_superseded
        self._recovering_since_s: float | None = None
        self._announced: Identity | None = None
        """The epoch whose readiness is in Postgres."""
        self.identity: Identity | None = None
        """None while no generation can pass through every stage."""

    def ready(self, identity: Identity) -> None:
        """The pipeline's thread: a generation can pass through every stage."""
        self.identity, self._recovering_since_s = identity, None

    def lost(self) -> None:
        """The pipeline's thread: a stage is gone."""
        self.identity, self._recovering_since_s = None, time.monotonic()

    @property
    def is_recovering(self) -> bool:
        """A stage was lost, and the pipeline forms anew."""
        return self._recovering_since_s is not None

    @property
    def is_given_up(self) -> bool:
        """It has been forming for longer than leases are kept."""
        since_s = self._recovering_since_s
        return since_s is not None and time.monotonic() - since_s > self._times.recover_s

    @property
    def num_stages(self) -> int:
        """Through which a step passes before the head's engine may have the next."""
        return max(1, len(self.identity.stages)) if self.identity else 1

    def announce(self) -> None:
        """Writes down what changed."""
        identity, announced = self.identity, self._announced
        if identity is announced:
            return
        with self._database.begin() as connection:
            if announced is not None:
                pipelines.unready(connection, announced.pipeline, announced.epoch)
            if identity is not None:
                pipelines.ready(
                    connection,
                    identity.pipeline,
                    identity.epoch,
                    seats=self._seats,
                    stages=identity.stages,
                    exact=identity.exact,
                    kv_tokens=identity.kv_tokens,
                )
        self._announced = identity
        if identity is not None:
            self._on_announced()

    def renew(self) -> None:
        """The row's lease."""
        announced = self._announced
        if announced is None:
            return
        with self._database.begin() as connection:
            held = pipelines.renew(connection, announced.pipeline, announced.epoch, self._times.lease_s)
        if not held and announced is self.identity:
            self._on_superseded(announced.epoch)
