"""Writes down what a pipeline's devices have drawn in an epoch, and for how many token rows.

Knows no job: a reader who asks what one took multiplies its rows by the mean.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog
from sqlalchemy import Engine as Database
from sqlalchemy.exc import SQLAlchemyError

from services.stage.hop.wiring import UNKNOWN
from services.stage.pipeline.pipeline import PipelineStatus
from shardline.store.statistics.costs import EpochEnergy, put_epoch_energy
from shardline_scheduler.step_times import EngineProgress

log = structlog.get_logger(__name__)


def epoch_energy(
    name: str,
    status: PipelineStatus,
    progress: EngineProgress,
    own_watts: float,
) -> EpochEnergy | None:
    """Returns what all stages together took, as far as they have reported. None: the pipeline is
    not ready, has computed nothing, or no stage's power is known."""
    sources = {member.card.capacity.power for member in status.members}
    is_whole = len(status.members) == len(status.stages) + 1
    is_present = status.epoch == progress.epoch and progress.num_tokens > 0
    if not (any(sources) and is_whole and is_present):
        return None
    later = (stage.status for stage in status.stages)
    later_j = sum(each.compute_us * each.power_mw for each in later) * 1e-9
    return EpochEnergy(
        pipeline=name,
        epoch=progress.epoch,
        source="+".join(sorted(source or UNKNOWN for source in sources)),
        energy_j=progress.compute_s * own_watts + later_j,
        num_rows=progress.num_tokens,
    )


class EnergyWriter(threading.Thread):
    """Has a separate thread: no lease and no end of a job waits for it or fails with it."""

    def __init__(
        self,
        database: Database,
        measure: Callable[[], EpochEnergy | None],
        *,
        every_s: float,
    ) -> None:
        super().__init__(name="energy", daemon=True)
        self._database = database
        self._measure = measure
        self._every_s = every_s
        self._stopped = threading.Event()
        self._last: EpochEnergy | None = None
        """The last one that was measured, in this epoch or before."""
        self._written: EpochEnergy | None = None
        self._is_failing = False

    def run(self) -> None:
        """Writes what has changed, and once more when it is stopped."""
        while not self._stopped.wait(self._every_s):
            self._write()
        self._write()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()

    def row_j(self) -> float:
        """Returns the mean joules of a row by now; 0 while unknown. Any thread."""
        energy = self._last = self._measure() or self._last
        return energy.energy_j / energy.num_rows if energy else 0.0

    def _write(self) -> None:
        energy = self._measure()
        if energy is None or energy == self._written:
            return
        self._last = energy
        try:
            with self._database.begin() as connection:
                put_epoch_energy(connection, energy)
        except SQLAlchemyError as error:
            if not self._is_failing:
                log.warning("energy is not written: jobs go on", error=type(error).__name__)
            self._is_failing = True
            return
        self._written = energy
        self._is_failing = False
