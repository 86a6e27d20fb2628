"""What the bell for relays says of new rows, on a real Postgres: so that of a relay's loops those
wake that have something to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine

from shardline.base.errors import Invalid
from shardline.contract.job import JobState
from shardline.contract.parents.parent_job import ParentJob
from shardline.contract.tables import JOBS_CHANNEL, PREPARE, SEND
from shardline.store.connection.database import transaction
from shardline.store.connection.notify import Listener, listening, ring
from shardline.store.jobs import FailedRequest, insert_failed, insert_jobs, request_cancel
from tests.integration.migrations.test_migrations import alembic
from tests.integration.rows import LONG_S, MODEL, change, database_with_head, request

OVER = "over"
PATIENCE_S = 30.0
TOKENS = ([1, 2], 3)
BEFORE_WORDS = "0035"
PLAIN_INSERT = "INSERT INTO jobs (model, prompt) VALUES ('m', 'text')"


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    with database_with_head(database_url) as engine:
        yield engine


@pytest.fixture
def bell(database_url: str) -> Iterator[Listener]:
    with listening(database_url, JOBS_CHANNEL) as bell:
        yield bell


def said(bell: Listener, engine: Engine) -> set[str]:
    """Every word since the last look."""
    with engine.begin() as connection:
        ring(connection, JOBS_CHANNEL, OVER)
    words: list[str] = []
    while OVER not in words:
        heard = bell.hear(PATIENCE_S)
        assert heard, "the bell is broken"
        words += heard
    return {*words} - {OVER}


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        pytest.param([(TOKENS, {})], {SEND}, id="prepared"),
        pytest.param([(TOKENS, {"delay_s": LONG_S})], set(), id="prepared for later"),
        pytest.param([(None, {})], {PREPARE}, id="not prepared"),
        pytest.param([(None, {"delay_s": LONG_S})], {PREPARE}, id="not prepared, for later"),
        pytest.param([(TOKENS, {}), (None, {})], {SEND, PREPARE}, id="one of each"),
        pytest.param([(TOKENS, {})] * 3, {SEND}, id="several"),
    ],
)
def test_the_bell_says_what_new_rows_need(
    engine: Engine, bell: Listener, kinds: list[tuple[Any, dict[str, Any]]], words: set[str]
) -> None:
    requests = [request(**fields) for _, fields in kinds]
    with engine.begin() as connection:
        insert_jobs(connection, requests, prepared=[tokens for tokens, _ in kinds])
    assert said(bell, engine) == words


def test_a_row_of_sql_is_to_be_prepared(engine: Engine, bell: Listener) -> None:
    change(engine, PLAIN_INSERT)
    assert said(bell, engine) == {PREPARE}


def test_a_repeat_and_a_refused_request_ring_for_nobody(engine: Engine, bell: Listener) -> None:
    one = request(idempotency_key="once")
    error = Invalid("prompt", "it is wrong", "Send another").as_dict()
    with engine.begin() as connection:
        (first,) = insert_jobs(connection, [one], prepared=[TOKENS])
    assert said(bell, engine) == {SEND}
    with engine.begin() as connection:
        assert not insert_jobs(connection, [one], prepared=[TOKENS])[0].is_new
        failed = FailedRequest(id=request().id or first.job_id, model=MODEL, error=error)
        insert_failed(connection, [failed])
    assert said(bell, engine) == set()


def test_a_child_and_the_end_of_its_parent_ring_for_who_prepares(
    engine: Engine, bell: Listener
) -> None:
    with engine.begin() as connection:
        (parent,) = insert_jobs(connection, [request(delay_s=LONG_S)], prepared=[TOKENS])
    assert said(bell, engine) == set()
    child = request(depends_on=(ParentJob(job=parent.job_id),))
    with engine.begin() as connection:
        insert_jobs(connection, [child], prepared=[TOKENS])
    assert said(bell, engine) == {PREPARE}
    change(engine, "UPDATE parents_of_jobs SET state = 'open'")
    with engine.begin() as connection:
        states = request_cancel(connection, [parent.job_id])
    assert states == {parent.job_id: JobState.CANCELLED}
    assert said(bell, engine) == {PREPARE}


def test_the_schema_before_rings_without_a_word(empty_database_url: str) -> None:
    for step, words in (
        (("upgrade", "head"), {PREPARE}),
        (("downgrade", BEFORE_WORDS), {""}),
        (("upgrade", "head"), {PREPARE}),
    ):
        alembic(empty_database_url, *step)
        with listening(empty_database_url, JOBS_CHANNEL) as bell:
            with transaction(empty_database_url) as connection:
                connection.exec_driver_sql(PLAIN_INSERT)
            assert {*(bell.hear(PATIENCE_S) or ())} == words
