"""What a head writes of its pipeline's energy, and that a Postgres that refuses it ends nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine as Database
from structlog.testing import capture_logs

from services.stage.pipeline.energy_writer import EnergyWriter
from shardline.store.connection.database import connect
from shardline.store.statistics.costs import EpochEnergy
from tests.integration.rows import cell, change
from tests.polling import until

WRITTEN = "SELECT sum(energy_j) FROM pipeline_energy"


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    engine = connect(database_url)
    yield engine
    engine.dispose()


def energy(energy_j: float, epoch: int = 1) -> EpochEnergy:
    return EpochEnergy(pipeline="p", epoch=epoch, source="table", energy_j=energy_j, num_rows=4)


def test_the_present_figure_of_each_epoch_is_written_at_the_latest_when_it_stops(
    database: Database,
) -> None:
    told = [energy(1.0)]
    writer = EnergyWriter(database, lambda: told[-1], every_s=0.01)
    writer.start()
    until(lambda: cell(database, WRITTEN) == 1.0)
    told.append(energy(2.0))
    until(lambda: cell(database, WRITTEN) == 2.0)
    told.append(energy(4.0, epoch=2))
    writer.stop()
    writer.join()

    assert cell(database, WRITTEN) == 2.0 + 4.0
    assert writer.row_j() == 1.0


def test_a_lost_pipeline_leaves_the_last_mean(database: Database) -> None:
    told: list[EpochEnergy | None] = [energy(2.0), None, None]
    writer = EnergyWriter(database, lambda: told.pop(0), every_s=1.0)
    assert [writer.row_j() for _ in range(3)] == [0.5] * 3


def test_what_postgres_refuses_is_told_once_and_written_later(database: Database) -> None:
    told = [energy(1.0)]
    change(database, "ALTER TABLE pipeline_energy RENAME TO elsewhere")
    writer = EnergyWriter(database, lambda: told[-1], every_s=0.01)
    with capture_logs() as logs:
        writer.start()
        until(lambda: logs)
        told.append(energy(3.0))
        change(database, "ALTER TABLE elsewhere RENAME TO pipeline_energy")
        until(lambda: cell(database, WRITTEN) == 3.0)
        writer.stop()
        writer.join()

    assert [line["event"] for line in logs] == ["energy is not written: jobs go on"]
