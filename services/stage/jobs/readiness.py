"""What a head is in the present epoch, and the row of its pipeline that reports it. Knows no jobs.

The row follows the head's state: `ready` and `lost` come from the pipeline's thread, the lease
manager's thread writes them down.
"""

from __future__ import annotations

import structlog
from sqlalchemy import Engine as Database

from services.stage.jobs.identity import Identity
from services.stage.jobs.lease_host import LeaseHost
from shardline.base.clock import monotonic_s
from shardline.base.config import Times
from shardline.store import models, pipelines

log = structlog.get_logger(__name__)

SUPERSEDED = "another head took this pipeline: its lease ran out, or one of the same name started"


class PipelineReadiness:
    """The lease manager's thread writes it down and reads it, but for `ready` and `lost`."""

    def __init__(self, database: Database, *, seats: int, times: Times, host: LeaseHost) -> None:
        self._database = database
        self._seats = seats
        self._times = times
        self._host = host
        self._recovering_since_s: float | None = None
        self._announced: Identity | None = None
        """The epoch with its readiness in Postgres."""
        self.identity: Identity | None = None
        """None while no generation can pass through every stage."""

    def ready(self, identity: Identity) -> None:
        """The pipeline's thread: a generation can pass through every stage."""
        self.identity = identity
        self._recovering_since_s = None

    def lost(self) -> None:
        """The pipeline's thread: a stage is gone."""
        self.identity = None
        self._recovering_since_s = monotonic_s()

    @property
    def is_recovering(self) -> bool:
        """A stage was lost, and the pipeline is being formed again."""
        return self._recovering_since_s is not None

    @property
    def is_given_up(self) -> bool:
        """It has been forming for longer than leases are kept."""
        since_s = self._recovering_since_s
        return since_s is not None and monotonic_s() - since_s > self._times.recover_s

    @property
    def num_stages(self) -> int:
        """Returns through how many stages a step passes before the head's engine may have the
        next."""
        return max(1, len(self.identity.stages)) if self.identity else 1

    def announce(self) -> None:
        """Writes down what changed."""
        identity = self.identity
        announced = self._announced
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
            self._host.on_announced()

    def renew(self) -> None:
        """The row's lease."""
        announced = self._announced
        if announced is None:
            return
        with self._database.begin() as connection:
            held = pipelines.renew(
                connection, announced.pipeline, announced.epoch, self._times.lease_s
            )
        if not held and announced is self.identity:
            self._host.on_superseded(announced.epoch, SUPERSEDED)

    def keep_registered(self) -> None:
        """Stores the model's row again if somebody has deleted it: doors refuse its jobs."""
        if self._announced is None:
            return
        model = self._announced.model
        with self._database.begin() as connection:
            # The whole row has a tokenizer, which is too much for each heartbeat.
            if not models.is_registered(connection, model):
                log.warning("the model's row was deleted: it is registered again", model=model)
                self._host.register_model(connection)
