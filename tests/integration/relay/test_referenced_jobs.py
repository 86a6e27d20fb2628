"""Retention beside an operator's own tables, with foreign keys to `jobs`."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine
from structlog.testing import capture_logs

from shardline_server.store import retention
from tests.integration.relay.test_retention import left, many, retention_loop
from tests.integration.rows import change

ORDERS = "CREATE TABLE orders (job_id uuid REFERENCES jobs {when})"


@pytest.mark.parametrize(
    "when", ["", "DEFERRABLE INITIALLY DEFERRED"], ids=["at once", "at commit"]
)
def test_what_a_foreign_key_keeps_holds_up_no_other_job(engine: Engine, when: str) -> None:
    change(engine, ORDERS.format(when=when))
    many(engine, retention.MAX_BATCH + 1, "'expired', now() - interval '31 days'")
    # Of the first batch.
    change(engine, "INSERT INTO orders SELECT id FROM jobs ORDER BY id LIMIT 2")
    loop = retention_loop(engine, days=30)

    with capture_logs() as logs:
        pauses = [loop.turn() for _ in range(4)]

    assert pauses == [1.0, 60.0, 60.0, 60.0]
    assert len(left(engine)) == 2
    (warning,) = [line for line in logs if line["log_level"] == "warning"]
    assert (warning["jobs"], '"orders"' in warning["error"]) == (2, True)
    change(engine, "DELETE FROM orders")
    loop.turn()
    assert left(engine) == set()
