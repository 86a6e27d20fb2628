"""Rates of energy as operators write them: numbers, files, addresses, and what is refused by
name."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest

from services.relay.statistics import rate_series
from services.relay.statistics.rate_series import read_rates
from shardline.base.errors import Invalid

FIELD = "SHARDLINE_ENERGY_PRICE"
MIDNIGHT = datetime(2026, 11, 25, tzinfo=UTC)
TWO = {MIDNIGHT: 0.31, MIDNIGHT + timedelta(hours=1): -0.02}


@pytest.mark.parametrize(("text", "value"), [("0.31", 0.31), ("-1", -1.0), ("380", 380.0)])
def test_a_number_is_one_rate(text: str, value: float) -> None:
    assert read_rates(text, FIELD) == value


@pytest.mark.parametrize(
    "content",
    [
        "time,price\n2026-11-25T00:00:00Z,0.31\n2026-11-25T01:00:00Z,-0.02\n",
        "2026-11-25T01:00+01:00, 0.31\r\n\r\n2026-11-25 01:00,-0.02",
        (
            '[{"time": "2026-11-25T00:00:00Z", "value": 0.31},'
            ' {"time": "2026-11-25T01:00:00Z", "value": -0.02}]'
        ),
    ],
    ids=["with a header", "other zones and blank lines", "json"],
)
def test_a_series_is_read_from_a_file(tmp_path: Path, content: str) -> None:
    file = tmp_path / "series"
    file.write_text(content, encoding="utf-8")
    assert read_rates(str(file), FIELD) == TWO


def test_moments_of_other_zones_are_kept_as_moments(tmp_path: Path) -> None:
    file = tmp_path / "series"
    file.write_text("2026-11-25T01:00+01:00,1", encoding="utf-8")
    assert read_rates(str(file), FIELD) == {
        datetime(2026, 11, 25, 1, tzinfo=timezone(timedelta(hours=1))): 1.0
    }


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "0 rates"),
        ("time,price\n", "0 rates"),
        ("2026-11-25T00:00Z,0.3,x", "line 1 has 3 columns"),
        ("time,price\nlater,0.3", "later"),
        ("time,price\n2026-11-25T00:00Z,cheap", "cheap"),
        ("2026-11-25T00:00Z,nan", "no rate"),
        ('[{"time": "2026-11-25T00:00:00Z"}]', "value"),
        ("[1]", "series cannot be read"),
    ],
)
def test_what_is_no_series_is_refused_with_the_reason(
    tmp_path: Path, content: str, problem: str
) -> None:
    file = tmp_path / "series"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(Invalid, match=f"{FIELD}: .*{problem}"):
        read_rates(str(file), FIELD)


@pytest.mark.parametrize("text", ["nan", "inf"])
def test_a_number_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="no rate"):
        read_rates(text, FIELD)


def test_a_series_beyond_the_limit_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_series, "MAX_BYTES", 64)
    file = tmp_path / "series"
    file.write_text("2026-11-25T00:00:00Z,1\n" * 5, encoding="utf-8")
    with pytest.raises(Invalid, match="longer than 64 bytes"):
        read_rates(str(file), FIELD)


class Publisher(BaseHTTPRequestHandler):
    """Has one series."""

    def do_GET(self) -> None:
        """Answers."""
        found = self.path == "/prices.csv"
        self.send_response(200 if found else 404)
        self.end_headers()
        self.wfile.write(
            b"time,price\n2026-11-25T00:00Z,0.31\n2026-11-25T01:00Z,-0.02\n" if found else b"none"
        )

    def log_message(self, format: str, *_: object) -> None:  # noqa: A002 (http.server's name)
        """Says nothing."""


@pytest.fixture
def address() -> Iterator[str]:
    """Of a server that publishes prices."""
    server = HTTPServer(("127.0.0.1", 0), Publisher)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_series_is_read_from_an_address(address: str) -> None:
    assert read_rates(f"{address}/prices.csv", FIELD) == TWO


def test_a_series_that_never_ends_is_given_up(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = iter([0.0, 3 * rate_series.TIMEOUT_S + 1])
    monkeypatch.setattr(rate_series, "monotonic_s", lambda: next(moments))
    with pytest.raises(httpx.ReadTimeout, match="had not come after 30 s"):
        read_rates(f"{address}/prices.csv", FIELD)


def test_an_address_without_a_series_is_an_error_of_http(address: str) -> None:
    with pytest.raises(httpx.HTTPError, match="404"):
        read_rates(f"{address}/none", FIELD)
