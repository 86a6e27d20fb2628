"""The relay writes what its settings name: numbers and series become rows, and what cannot be read
changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from traceback import format_exception

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import Engine
from structlog.testing import capture_logs

from services.relay.loop import LoopContext
from services.relay.statistics.energy_rates import EnergyRates
from services.relay.statistics.rate_series import read_rates
from shardline.base.config import Times
from shardline.base.errors import Invalid
from shardline.store.statistics.costs import present_rates
from shardline_server.metrics import RelayMetrics
from tests.integration.rows import cell

SECRET = "sesame-4711"


def rates(
    engine: Engine, registry: CollectorRegistry, *, price: str | None, carbon: str | None
) -> EnergyRates:
    context = LoopContext(database=engine, times=Times(), metrics=RelayMetrics(registry))
    return EnergyRates(context, {"price": price, "carbon": carbon})


def test_a_number_and_a_series_become_rows_and_metrics(engine: Engine, tmp_path: Path) -> None:
    series = tmp_path / "carbon.csv"
    registry = CollectorRegistry()
    this_year = datetime.now(UTC).year
    series.write_text(
        f"time,gCO2e\n{this_year}-01-01T00:00Z,380\n{this_year + 1}-01-01T00:00Z,90\n",
        encoding="utf-8",
    )
    loop = rates(engine, registry, price="0.31", carbon=str(series))
    loop.turn()
    loop.turn()

    with engine.begin() as connection:
        assert present_rates(connection) == {"price": 0.31, "carbon": 380.0}
    assert cell(engine, "SELECT count(*) FROM energy_rates") == 3
    assert registry.get_sample_value("shardline_energy_rate", {"kind": "carbon"}) == 380.0


@contextmanager
def served(answer: bytes, status: int = 200) -> Iterator[tuple[str, list[str]]]:
    """A source at an address with a password and a token, and the requests that it got."""
    asked: list[str] = []

    class Source(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Source) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield (
            f"http://someone:{SECRET}@127.0.0.1:{server.server_port}/?securityToken={SECRET}",
            asked,
        )
        server.shutdown()


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (b"gone", 401),
        (b"<html>" + b"x" * 200_000, 200),
        (b"2026-01-01T00:00Z,1\n2026-01-02T00:00Z,x", 200),
        (b'[{"time": "2026-01-01T00:00:00Z", "value": 1e999}]', 200),
        (b"[" * 100_000, 200),
        (b"\xff\x00", 200),
        (b"", 200),
    ],
)
def test_whatever_a_source_answers_the_other_one_is_read_and_no_address_is_logged(
    engine: Engine, answer: bytes, status: int
) -> None:
    with served(answer, status) as (address, asked), capture_logs() as logs:
        rates(engine, CollectorRegistry(), price=address, carbon="380").turn()

    assert len(asked) == 1
    (warned,) = [line for line in logs if line["log_level"] == "warning"]
    assert SECRET not in str(warned)
    with engine.begin() as connection:
        assert present_rates(connection) == {"carbon": 380.0}


def test_an_error_of_a_source_carries_no_password_in_its_causes() -> None:
    with served(b"x" * 200_000) as (address, _), pytest.raises(Invalid) as caught:
        read_rates(address, "SHARDLINE_ENERGY_PRICE")

    assert SECRET not in "".join(format_exception(caught.value))


def test_a_source_that_cannot_be_read_leaves_the_rates_and_the_others_alone(
    engine: Engine, tmp_path: Path
) -> None:
    rates(engine, CollectorRegistry(), price="0.31", carbon=None).turn()
    with capture_logs() as logs:
        rates(engine, CollectorRegistry(), price=str(tmp_path / "gone"), carbon="380").turn()

    assert [line["event"] for line in logs if line["log_level"] == "warning"] == [
        "rates of energy cannot be read"
    ]
    with engine.begin() as connection:
        assert present_rates(connection) == {"price": 0.31, "carbon": 380.0}
