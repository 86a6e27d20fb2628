"""A stage in a fleet: it offers its device, waits for a model and layers, and goes when it is given
other ones.

Its supervisor starts it again, and it loads the new ones: what moves layers is what brings a dead
stage back. Knows no Celery and no engine; the plan is made by a relay's coordinator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import structlog
from sqlalchemy import Engine as Database
from sqlalchemy.exc import DBAPIError

from shardline.base.config import Times
from shardline.store import fleets
from shardline.store.connection.database import failure_of, unavailable
from shardline.store.fleets import LayerAssignment, PeerAddress, WorkerOffer
from shardline_costs import DeviceProfile
from shardline_costs.drift import Drift

log = structlog.get_logger(__name__)


class Membership(threading.Thread):
    """Renews the worker's lease in its own thread, from its announcement until it leaves."""

    def __init__(
        self,
        database: Database,
        worker: str,
        times: Times,
        models: Sequence[str],
        peer: PeerAddress,
    ) -> None:
        super().__init__(name="membership", daemon=True)
        self._database = database
        self._worker = worker
        self._models = models
        self._peer = peer
        self._lease_s = fleets.LEASES * times.lease_s
        self._stopped = threading.Event()
        self._has_joined = threading.Event()
        self._given: LayerAssignment | None = None
        self._has_layers = threading.Event()
        self._moved: Callable[[], None] | None = None
        self._drift: Drift | None = None
        self._drifted: Callable[[DeviceProfile], None] | None = None

    def announce(self) -> None:
        """Reports that the worker will join once its device is measured: the first plan of a fleet
        waits for it.

        Raises Unavailable if Postgres does not answer.
        """
        try:
            self._beat()
        except DBAPIError as error:
            raise unavailable(error) from error
        self.start()

    def others(self) -> list[PeerAddress]:
        """Returns where workers on other machines, and on this one, answer. Raises Unavailable if
        Postgres does not answer."""
        try:
            with self._database.begin() as connection:
                return fleets.peers(connection, self._worker)
        except DBAPIError as error:
            raise unavailable(error) from error

    def join_fleet(self, offers: Mapping[str, WorkerOffer]) -> None:
        """Offers the device to the models. Raises Unavailable if Postgres does not answer."""
        try:
            with self._database.begin() as connection:
                fleets.join(connection, self._worker, offers, lease_s=self._lease_s)
        except DBAPIError as error:
            raise unavailable(error) from error
        self._has_joined.set()
        log.info("worker joined its fleet", worker=self._worker, models=sorted(offers))

    def wait_for_layers(self) -> LayerAssignment:
        """Returns the model and the layers that the first plan with this worker gives it."""
        self._has_layers.wait()
        assert self._given is not None
        return self._given

    def when_moved(self, moved: Callable[[], None]) -> None:
        """Calls this once, in the membership's thread, when the plan gives the worker other layers,
        or none."""
        self._moved = moved

    def watch(self, drift: Drift, drifted: Callable[[DeviceProfile], None]) -> None:
        """Informs the plan, from now on, when the device has drifted, and calls `drifted` in the
        membership's thread."""
        self._drifted = drifted
        self._drift = drift

    def leave(self) -> None:
        """Ends the thread, and the membership unless the worker comes back for other layers."""
        self._stopped.set()
        self.join()
        if self._moved is not None:
            try:
                with self._database.begin() as connection:
                    fleets.leave(connection, self._worker)
            except DBAPIError as error:
                log.warning(
                    "the fleet misses this worker after its lease only",
                    problem=str(failure_of(error)),
                )

    def run(self) -> None:
        """Beats until stopped. Without Postgres the worker goes on with the layers that it has."""
        while not self._stopped.wait(self._lease_s / fleets.BEATS_IN_LEASE):
            try:
                given = self._beat()
            except DBAPIError as error:
                log.warning("no beat of this worker", problem=str(failure_of(error)))
                continue
            # A plan of a model that it served under other settings counts for nothing.
            self._take(given if given and given.model in self._models else None)
            self._look_for_drift()

    def _beat(self) -> LayerAssignment | None:
        """Renews the lease; returns what the plan gives the worker, if it has joined."""
        with self._database.begin() as connection:
            if self._has_joined.is_set():
                return fleets.beat(connection, self._worker, self._lease_s)
            fleets.announce(
                connection, self._worker, self._models, lease_s=self._lease_s, peer=self._peer
            )
            return None

    def _look_for_drift(self) -> None:
        """Tells the plan. What Postgres does not get now it gets when the worker joins again."""
        if self._drift is None or self._drifted is None or self._given is None:
            return
        factor = self._drift.take()
        if factor is None:
            return
        log.warning(
            "this device has drifted: steps take other times than planned", factor=round(factor, 2)
        )
        self._drifted(self._drift.profile)
        try:
            with self._database.begin() as connection:
                fleets.refresh(connection, self._worker, self._given.model, self._drift.profile)
        except DBAPIError as error:
            log.warning(
                "the plan does not know that this device has drifted",
                problem=str(failure_of(error)),
            )

    def _take(self, given: LayerAssignment | None) -> None:
        if self._given is None:
            if given is not None:
                self._given = given
                self._has_layers.set()
        elif given != self._given and self._moved is not None:
            log.info(
                "the plan gives this worker other layers",
                old=_shown(self._given),
                new=_shown(given),
            )
            moved = self._moved
            self._moved = None
            moved()


def _shown(given: LayerAssignment | None) -> str:
    return f"{given.model} {given.layers[0]}-{given.layers[1] - 1}" if given else "none"
