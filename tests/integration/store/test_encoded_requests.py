"""Requests that have nothing to do with each other, stored in one transaction: each has its own
outcome."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest
from sqlalchemy import Engine, text

from shardline.base.errors import Conflict, Invalid
from shardline.contract.job import JobRequest
from shardline.store.inserts import StoredRequest, encode_request, insert_encoded
from shardline.store.jobs import insert_jobs
from tests.integration.rows import database_with_head


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    with database_with_head(database_url) as engine:
        yield engine


def test_a_conflict_is_the_outcome_of_its_own_request(engine: Engine) -> None:
    # Given two jobs, one of them under a key
    first = uuid4()
    keyed = uuid4()
    with engine.begin() as connection:
        insert_jobs(
            connection,
            [
                JobRequest(model="a", prompt="b", id=first),
                JobRequest(model="a", prompt="b", id=keyed, idempotency_key="k"),
            ],
        )

    # When a transaction has good requests, repeats, and such that ask for something else
    requests = [
        JobRequest(model="a", prompt="new", id=uuid4()),
        JobRequest(model="a", prompt="other", id=first),
        JobRequest(model="a", prompt="b", id=first),
        JobRequest(model="a", prompt="b", id=first, idempotency_key="k"),
        JobRequest(model="a", prompt="other", idempotency_key="k"),
        JobRequest(model="a", prompt="newer", id=uuid4()),
    ]
    with engine.begin() as connection:
        outcomes = insert_encoded(connection, [encode_request(request) for request in requests])

    # Then those alone conflict, and the others are stored
    assert [type(outcome) for outcome in outcomes] == [
        StoredRequest,
        Conflict,
        StoredRequest,
        Conflict,
        Conflict,
        StoredRequest,
    ]
    assert outcomes[2] == StoredRequest(job_id=first, is_new=False)
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM jobs")) == 4
    with engine.begin() as connection, pytest.raises(Conflict):
        insert_jobs(connection, requests)


def test_what_postgres_cannot_hold_is_refused_before_its_transaction() -> None:
    with pytest.raises(Invalid, match="NUL"):
        encode_request(JobRequest(model="a", prompt="b\0"))
