"""Retention beside an operator's own tables, with foreign keys to `jobs` and `batches`."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine
from structlog.testing import capture_logs

from shardline_server.store import retention
from tests.integration.relay.test_retention import BATCH, ended, left, many, retention_loop
from tests.integration.rows import cell, change

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
    assert (warning["rows"], '"orders"' in warning["error"]) == (2, True)
    change(engine, "DELETE FROM orders")
    loop.turn()
    assert left(engine) == set()


def test_batches_that_a_foreign_key_keeps_hold_up_no_other_and_no_job(engine: Engine) -> None:
    change(engine, "CREATE TABLE imports (batch_id uuid REFERENCES batches)")
    for _ in range(retention.MAX_BATCHES + 1):
        change(engine, BATCH, id=ended(engine, days=40))
    change(engine, "UPDATE batches SET completed_at = completed_at - interval '2 days'")
    # All of the first look.
    most = f"SELECT id FROM batches ORDER BY created_at, id LIMIT {retention.MAX_BATCHES}"
    change(engine, f"INSERT INTO imports {most}")
    loose = ended(engine, days=40)
    loop = retention_loop(engine, days=30)

    with capture_logs() as logs:
        loop.turn()

    assert cell(engine, "SELECT count(*) FROM batches") == retention.MAX_BATCHES
    assert loose not in left(engine)
    assert len(left(engine)) == retention.MAX_BATCHES
    (warning,) = [line for line in logs if line["log_level"] == "warning"]
    assert (warning["rows"], '"imports"' in warning["error"]) == (retention.MAX_BATCHES, True)
