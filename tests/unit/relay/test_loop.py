"""A loop of the relay says what went wrong in a turn, and tries again."""

from __future__ import annotations

import psycopg.errors
import pytest
from prometheus_client import CollectorRegistry, Counter
from sqlalchemy.exc import OperationalError, ProgrammingError
from structlog.testing import capture_logs

from services.relay.loop import Loop


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
