"""Postgres refuses one head and nobody else: a cut that hit everybody would prove nothing about
leases."""

from __future__ import annotations

import psycopg
import pytest

from tests.chaos.faults.lease_faults import refused

HEAD = "shardline stack-0.0@here"
OTHER = "shardline stack-1.0@here"


def session(database_url: str, name: str) -> psycopg.Connection[tuple[object, ...]]:
    return psycopg.connect(database_url, application_name=name, autocommit=True)


def test_a_refused_heads_sessions_end_and_it_may_return_afterwards(database_url: str) -> None:
    with (
        session(database_url, HEAD) as head,
        session(database_url, OTHER) as other,
        session(database_url, "t") as own,
    ):
        with refused(own, HEAD):
            with pytest.raises(psycopg.OperationalError):
                head.execute("SELECT 1")
            with pytest.raises(psycopg.OperationalError, match="this head is cut off"):
                session(database_url, HEAD)
            other.execute("SELECT 1")
            session(database_url, OTHER).close()
        session(database_url, HEAD).close()
        with refused(own, OTHER):
            session(database_url, HEAD).close()
