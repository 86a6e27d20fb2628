"""The relay writes what its settings name: numbers and series become rows, and what cannot be read changes nothing."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from prometheus_client import CollectorRegistry
from sqlalchemy import Engine
from structlog.testing import capture_logs

from services.relay.energy_rates import EnergyRates
from services.relay.loop import LoopContext
from shardline.config import Times
from shardline.metrics import RelayMetrics
from shardline.store.costs import present_rates
from tests.integration.rows import cell


def rates(engine: Engine, registry: CollectorRegistry, *, price: str | None, carbon: str | None) -> EnergyRates:
    context = LoopContext(database=engine, times=Times(), metrics=RelayMetrics(registry))
    return EnergyRates(context, {"price": price, "carbon": carbon})


def test_a_number_and_a_series_become_rows_and_metrics(engine: Engine, tmp_path: Path) -> None:
    series, registry = tmp_path / "carbon.csv", CollectorRegistry()
    this_year = datetime.now(UTC).year
    series.write_text(f"time,gCO2e\n{this_year}-01-01T00:00Z,380\n{this_year + 1}-01-01T00:00Z,90\n", encoding="utf-8")
    loop = rates(engine, registry, price="0.31", carbon=str(series))
    loop.turn()
    loop.turn()

    with engine.begin() as connection:
        assert present_rates(connection) == {"price": 0.31, "carbon": 380.0}
    assert cell(engine, "SELECT count(*) FROM energy_rates") == 3
    assert registry.get_sample_value("shardline_energy_rate", {"kind": "carbon"}) == 380.0


def test_a_source_that_cannot_be_read_leaves_the_rates_and_the_others_alone(engine: Engine, tmp_path: Path) -> None:
    rates(engine, CollectorRegistry(), price="0.31", carbon=None).turn()
    with capture_logs() as logs:
        rates(engine, CollectorRegistry(), price=str(tmp_path / "gone"), carbon="380").turn()

    assert [line["event"] for line in logs if line["log_level"] == "warning"] == ["rates of energy cannot be read"]
    with engine.begin() as connection:
        assert present_rates(connection) == {"price": 0.31, "carbon": 380.0}
