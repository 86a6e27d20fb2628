"""Fields at their limits and beyond as rows of a real Postgres: stored, read and claimed as they
were asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine

from shardline.base.errors import Invalid
from shardline.contract.ids import new_id
from shardline.contract.job import JobRequest
from shardline.contract.request_parsing import parse_request
from shardline.store import jobs, listing
from shardline_server.store import claims
from tests.extreme_fields import Drawn, drawn
from tests.integration.rows import HEAD, LONG_S, MODEL, database_with_head


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    with database_with_head(database_url) as engine:
        yield engine


def parsed(one: Drawn) -> JobRequest | None:
    """As a door takes it, under an id of its own; None: refused, as it must be."""
    document = {**one.document, "model": MODEL, "id": str(new_id())}
    key = document.get("idempotency_key")
    if isinstance(key, str) and "idempotency_key" not in one.beyond:
        document["idempotency_key"] = f"{document['id']}{key}"[:256]
    try:
        return parse_request(document)
    except Invalid:
        assert one.beyond
        return None


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
    ],
)
@given(documents=st.lists(drawn(JobRequest), min_size=1, max_size=8))
def test_what_a_door_takes_is_a_row_that_every_reader_has(
    engine: Engine, documents: list[Drawn]
) -> None:
    taken = [request for one in documents if (request := parsed(one)) is not None]
    ids = [request.id for request in taken if request.id is not None]
    with engine.begin() as connection:
        jobs.insert_jobs(connection, taken, prepared=[((5, 6), 8)] * len(taken))
    with engine.begin() as connection:
        found = jobs.get_jobs(connection, ids)
        listing.list_jobs(connection)
        claimed = claims.claim(connection, ids, HEAD, lease_s=LONG_S, exact_wait_s=LONG_S)
    assert [job.params for job in found] == [request.params() for request in taken]
    assert all(
        job.seed == request.seed
        for job, request in zip(found, taken, strict=True)
        if request.seed is not None
    )
    due = {
        request.id
        for request in taken
        if request.delay_s == 0 and request.deadline_s in (None, 31_536_000)
    }
    assert due <= {one.job_id for one in claimed}
