"""How a head chooses among the jobs that it was offered, before it claims any."""

from __future__ import annotations

from collections.abc import Collection
from uuid import UUID

import psycopg
import pytest
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection
from sqlalchemy import Engine as Database

from services.stage.engine.executor import Executor
from shardline.base.config import Times
from shardline_server.store import crashes
from tests.integration.stage.jobs.lone_head import open_lone_head, submit


def test_a_head_holds_no_transaction_while_it_chooses(
    database: Database, executor: Executor, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = crashes.quarantined
    statuses = []

    def quarantined(connection: Connection, ids: Collection[str]) -> list[UUID]:
        found = real(connection, ids)
        driver = connection.connection.driver_connection
        assert isinstance(driver, psycopg.Connection)
        statuses.append(driver.info.transaction_status)
        return found

    monkeypatch.setattr(crashes, "quarantined", quarantined)
    job_id = submit(database, 1)

    with open_lone_head(database, executor, redis_url, Times().scaled(0.2)) as head:
        head.offer(job_id)
        assert head.verdict() == (job_id, "started")

    assert statuses == [TransactionStatus.IDLE]
