"""A loop of the relay says what went wrong in a turn, and tries again."""

from __future__ import annotations

import threading

import psycopg.errors
import pytest
from prometheus_client import CollectorRegistry, Counter
from sqlalchemy.exc import OperationalError, ProgrammingError
from structlog.testing import capture_logs

from services.relay import loop as loop_module
from services.relay.loop import MIN_PAUSE_S, Loop


class Once(Loop):
    """Fails in its first turn, and stops in its second."""

    def __init__(self, error: Exception) -> None:
        super().__init__(
            "once", Counter("errors", "for tests", ["server"], registry=CollectorRegistry())
        )
        self._error: Exception | None = error

    def turn(self) -> float:
        if self._error is not None:
            error = self._error
            self._error = None
            raise error
        self.stop()
        return 0.0


REFUSED = ProgrammingError("SELECT", {}, psycopg.errors.UndefinedTable("there is no such table"))
LOST = OperationalError("SELECT", {}, psycopg.OperationalError("connection refused"))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        pytest.param(
            REFUSED, {"event": "Postgres refuses a statement", "sqlstate": "42P01"}, id="refused"
        ),
        pytest.param(LOST, {"event": "postgres unreachable", "server": "postgres"}, id="lost"),
    ],
)
def test_only_a_lost_postgres_is_called_away(error: Exception, said: dict[str, str]) -> None:
    with capture_logs() as told:
        Once(error).run()
    (line,) = told
    assert line.items() >= said.items()
    assert str(getattr(error, "orig", None)) == line["error"]


class WaitLog(threading.Event):
    """Notes how long it is waited for, and waits for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.waits_s: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits_s.append(timeout or 0.0)
        return self.is_set()


@pytest.mark.parametrize(
    ("rested_s", "pause_s"),
    [
        pytest.param(0.0, MIN_PAUSE_S, id="just ended"),
        pytest.param(MIN_PAUSE_S / 4, MIN_PAUSE_S * 3 / 4, id="a little later"),
        pytest.param(1.0, 0.0, id="long ago"),
    ],
)
def test_a_loop_that_has_rested_begins_at_once_when_woken(
    monkeypatch: pytest.MonkeyPatch, rested_s: float, pause_s: float
) -> None:
    now_s = iter((5.0, 5.0 + rested_s))
    monkeypatch.setattr(loop_module, "monotonic_s", lambda: next(now_s, 9.0))
    looped = Once(LOST)
    looped._error = None
    stopped = WaitLog()
    looped._stopped = stopped
    looped.wake()

    looped.run()

    assert stopped.waits_s == [pytest.approx(pause_s)]
