"""Preparation on a real Postgres: while texts become tokens nothing is locked and no transaction
waits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import Engine, event, text

from services.relay.celery.celery_results import CeleryResults
from services.relay.loop import LoopContext
from services.relay.outbox import Outbox
from services.relay.preparation.preparer import Preparer
from shardline.base.config import Times
from shardline.contract.job import JobState
from shardline.store import jobs, models
from shardline.store.connection.database import connect
from shardline_server.metrics import RelayMetrics
from shardline_server.tokenize import PreparedPrompt, Tokens
from tests.integration.relay.relay_stack import words_tokenizer
from tests.integration.rows import (
    MODEL,
    cell,
    change,
    database_with_head,
    model_row,
    request,
    state,
)
from tests.polling import until

LONG_PROMPT = "one " * 60_000
NUM_LONG = 10
CONTEXT = 131_072
IDLE_S = 0.5
"""Postgres ends a session that leaves a transaction open for so long."""
LOCK = text("SELECT FROM jobs WHERE id = :id FOR UPDATE")

Look = Callable[[], object]


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    """One whose model takes long texts, and whose pipeline has KV for them."""
    with database_with_head(database_url) as engine:
        with engine.begin() as connection:
            row = {**model_row(MODEL), "tokenizer": words_tokenizer(), "context_length": CONTEXT}
            models.register_model(connection, row)
            connection.execute(
                text("UPDATE pipelines SET kv_tokens = :kv_tokens"), {"kv_tokens": CONTEXT}
            )
        yield engine


def preparer(engine: Engine) -> Preparer:
    """A relay's, with an outbox that sends nothing."""
    metrics = RelayMetrics(CollectorRegistry())
    times = Times().scaled(0.2)
    context = LoopContext(database=engine, times=times, metrics=metrics)
    results = CeleryResults(context, backend_app=None)
    outbox = cast(Outbox, SimpleNamespace(wake=lambda: None))
    return Preparer(context, outbox=outbox, results=results)


def insert(engine: Engine, num: int = 1, prompt: str = "one two") -> list[UUID]:
    """Rows that need a relay."""
    with engine.begin() as connection:
        return [one.job_id for one in jobs.insert_jobs(connection, [request(prompt=prompt)] * num)]


@pytest.fixture
def while_tokenized(monkeypatch: pytest.MonkeyPatch) -> Callable[[Look], None]:
    """What the test wants to see in the midst of each tokenization."""

    def install(look: Look) -> None:
        real = Tokens.prepare

        def prepare(self: Tokens, **what: Any) -> PreparedPrompt:
            look()
            return real(self, **what)

        monkeypatch.setattr(Tokens, "prepare", prepare)

    return install


def test_no_transaction_waits_for_tokenization(
    engine: Engine, while_tokenized: Callable[[Look], None]
) -> None:
    idle = (
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE datname = current_database() AND state LIKE 'idle in trans%'"
    )
    seen: list[int] = []
    while_tokenized(lambda: seen.append(cell(engine, idle)))
    insert(engine, 3)

    preparer(engine).turn()

    assert seen == [0, 0, 0]
    assert cell(engine, "SELECT count(*) FROM jobs WHERE prepared_at IS NOT NULL") == 3


def test_cancelling_a_row_under_tokenization_waits_for_nobody_and_it_is_not_sent(
    engine: Engine, while_tokenized: Callable[[Look], None]
) -> None:
    (job_id,) = insert(engine)
    impatient = connect(engine.url.render_as_string(hide_password=False), lock_timeout_s=0.2)

    def cancel() -> None:
        with impatient.begin() as connection:
            assert jobs.request_cancel(connection, [job_id], running=False) == {
                job_id: JobState.CANCELLED
            }

    while_tokenized(cancel)

    preparer(engine).turn()
    impatient.dispose()

    assert state(engine, job_id) is JobState.CANCELLED


def test_many_long_prompts_are_prepared_under_short_postgres_timeouts(engine: Engine) -> None:
    insert(engine, NUM_LONG, LONG_PROMPT)
    impatient = connect(engine.url.render_as_string(hide_password=False), idle_timeout_s=IDLE_S)
    relay = preparer(impatient)

    relay.start()
    waiting = "SELECT count(*) FROM jobs WHERE prepared_at IS NULL"
    until(lambda: cell(engine, waiting) == 0)
    relay.stop()
    relay.join()
    impatient.dispose()


def test_finished_rows_of_a_batch_are_marked_before_the_rest(
    engine: Engine, while_tokenized: Callable[[Look], None]
) -> None:
    insert(engine, 3)
    relay = preparer(engine)
    prepared = "SELECT count(*) FROM jobs WHERE prepared_at IS NOT NULL"
    num_done: list[int] = []
    relay.mark_every_s = 0.0
    while_tokenized(lambda: num_done.append(cell(engine, prepared)))

    relay.turn()

    assert num_done == [0, 1, 2]


def test_rows_not_marked_for_want_of_postgres_are_marked_in_the_next_turn(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job_id,) = insert(engine)
    relay = preparer(engine)
    mark = Preparer._mark

    def fails(self: Preparer, answers: Any) -> None:
        monkeypatch.setattr(Preparer, "_mark", mark)
        raise ConnectionError

    monkeypatch.setattr(Preparer, "_mark", fails)

    with pytest.raises(ConnectionError):
        relay.turn()
    relay.turn()

    assert cell(engine, "SELECT prepared_at IS NOT NULL FROM jobs WHERE id = :id", id=job_id)


def test_a_tokenizer_that_panics_as_it_loads_fails_its_own_models_jobs_alone(
    engine: Engine,
) -> None:
    broken = json.loads(words_tokenizer())
    broken["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    with engine.begin() as connection:
        row = {**model_row("broken"), "tokenizer": json.dumps(broken)}
        models.register_model(connection, row)
        (bad,) = jobs.insert_jobs(connection, [request(model="broken", prompt="one")])
    (good,) = insert(engine)

    preparer(engine).turn()

    assert state(engine, bad.job_id) is JobState.FAILED
    assert cell(engine, "SELECT prepared_at IS NOT NULL FROM jobs WHERE id = :id", id=good)


@pytest.mark.parametrize(
    "asked", [{"model": "m:legal"}, {"adapter": "legal"}], ids=["address", "field"]
)
def test_an_adapter_is_taken_apart_from_its_model(engine: Engine, asked: dict[str, str]) -> None:
    with engine.begin() as connection:
        models.register_adapters(connection, MODEL, {"legal": "f"})
        (stored,) = jobs.insert_jobs(
            connection, [request(prompt="one two", temperature=0.5, **asked)]
        )

    preparer(engine).turn()

    with engine.begin() as connection:
        job = jobs.get_job(connection, stored.job_id)
    assert job is not None
    assert (job.model, job.params.adapter, job.params.temperature) == (MODEL, "legal", 0.5)
    assert job.prompt_token_ids is not None


def test_an_unknown_adapter_is_refused_with_those_that_there_are(engine: Engine) -> None:
    with engine.begin() as connection:
        models.register_adapters(connection, MODEL, {"legal": "f"})
        (stored,) = jobs.insert_jobs(connection, [request(model="m:medical")])

    preparer(engine).turn()

    with engine.begin() as connection:
        job = jobs.get_job(connection, stored.job_id)
    assert job is not None
    assert job.state is JobState.FAILED
    assert job.error is not None
    assert job.error["problem"] == "no model named 'm:medical' is registered"
    assert job.error["remedy"] == "Use one of: m, m:legal"


def waits(engine: Engine, then: Look) -> list[str]:
    """The statements with which a transaction is told how long to wait for locks; `then` follows
    each."""
    seen: list[str] = []

    @event.listens_for(engine, "before_cursor_execute")
    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "lock_timeout" in statement:
            seen.append(statement)
            then()

    return seen


@pytest.mark.parametrize("prompt", ["one two", "one " * CONTEXT], ids=["marked", "refused"])
def test_a_row_locked_for_a_moment_is_marked_without_a_second_loan(
    engine: Engine, while_tokenized: Callable[[Look], None], prompt: str
) -> None:
    (taken,) = insert(engine, 1, prompt)
    insert(engine, 1)
    with engine.connect() as other:
        seen = waits(engine, other.rollback)
        while_tokenized(lambda: other.in_transaction() or other.execute(LOCK, {"id": taken}))
        preparer(engine).turn()
    done = "SELECT count(*) FROM jobs WHERE prepared_at IS NOT NULL OR state = 'failed'"
    assert (cell(engine, done), len(seen)) == (2, 1)


def test_a_row_that_stays_locked_is_left_to_its_loan_and_others_are_marked(
    engine: Engine, while_tokenized: Callable[[Look], None]
) -> None:
    taken, free = insert(engine, 2)
    prepared = "SELECT array_agg(id) FROM jobs WHERE prepared_at IS NOT NULL"
    seen = waits(engine, lambda: None)
    with engine.connect() as other:
        while_tokenized(lambda: other.closed or other.execute(LOCK, {"id": taken}))
        preparer(engine).turn()
        assert (cell(engine, prepared), len(seen)) == ([free], 1)
    change(engine, "UPDATE jobs SET preparing_until = now()")
    preparer(engine).turn()
    assert (set(cell(engine, prepared)), len(seen)) == ({free, taken}, 1)
