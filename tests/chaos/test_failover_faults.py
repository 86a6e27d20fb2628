"""The failover itself: a client meets a standby, nothing that was acknowledged is lost, and no
second server stays."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psycopg
import pytest

from services.standalone.servers import FAST, Postgres
from shardline.base.config import Times
from tests.chaos.faults.failover_faults import fail_over_and_back
from tests.chaos.network.proxy import Proxy
from tests.chaos.stack.local_target import LocalTarget


@dataclass(slots=True)
class Writer:
    """A service that keeps its connection until that is of no use."""

    url: str
    over: threading.Event = field(default_factory=threading.Event)
    written: set[int] = field(default_factory=set)
    num_refused: int = 0

    def run(self) -> None:
        """One row after the other."""
        number = 0
        while not self.over.is_set():
            try:
                with psycopg.connect(self.url, autocommit=True, connect_timeout=5) as connection:
                    while not self.over.wait(0.01):
                        number += 1
                        connection.execute("INSERT INTO numbers VALUES (%s)", (number,))
                        self.written.add(number)
            except psycopg.errors.ReadOnlySqlTransaction:
                self.num_refused += 1
            except psycopg.Error:
                continue


@pytest.fixture
def target(tmp_path: Path) -> Iterator[LocalTarget]:
    """Of a real Postgres behind a proxy."""
    with ExitStack() as ending:
        postgres = Postgres(tmp_path, settings=FAST)
        ending.callback(postgres.kill)
        postgres.start()
        proxy = Proxy(postgres.socket)
        proxy.start()
        ending.callback(proxy.stop)
        times = Times().scaled(0.05)
        yield cast(
            LocalTarget, SimpleNamespace(postgres=postgres, database_proxy=proxy, times=times)
        )


def test_a_failover_and_back_loses_no_row_and_shows_clients_a_standby(target: LocalTarget) -> None:
    first = target.postgres
    with psycopg.connect(first.url(), autocommit=True) as connection:
        connection.execute("CREATE TABLE numbers (number int)")
    port = target.database_proxy.port
    writer = Writer(
        f"postgresql://shardline@127.0.0.1:{port}/shardline?sslmode=disable&gssencmode=disable"
    )
    thread = threading.Thread(target=writer.run)
    thread.start()
    try:
        fail_over_and_back(target, random.Random(1))
    finally:
        writer.over.set()
        thread.join()
    assert target.postgres is first
    with psycopg.connect(first.url()) as connection:
        found = {number for (number,) in connection.execute("SELECT number FROM numbers")}
    assert writer.num_refused > 0
    assert writer.written
    assert writer.written <= found
    assert list(first.home.glob("failover-*")) == []
