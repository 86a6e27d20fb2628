"""What a relay makes of jobs that waited: their prompts with the texts of their parents."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from sqlalchemy import Engine, text

from services.relay.celery.celery_results import CeleryResults
from services.relay.loop import LoopContext
from services.relay.outbox import Outbox
from services.relay.preparation.preparer import Preparer
from shardline.base.config import Times
from shardline.contract.job import Job, JobState
from shardline.contract.parents.parent_job import ParentJob
from shardline.store import jobs, models
from shardline_server.metrics import RelayMetrics
from tests.integration.relay.relay_stack import words_tokenizer
from tests.integration.rows import (
    MODEL,
    change,
    claim_one,
    database_with_head,
    end_one,
    model_row,
    request,
    submit,
    success,
)

ONE, TWO, THREE = 2, 3, 4


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    with database_with_head(database_url) as engine:
        with engine.begin() as connection:
            models.register_model(connection, {**model_row(MODEL), "tokenizer": words_tokenizer()})
        yield engine


@pytest.fixture
def relay(engine: Engine) -> Preparer:
    return new_relay(engine)


def new_relay(engine: Engine) -> Preparer:
    """What prepares in one, with an outbox that sends nothing."""
    metrics = RelayMetrics(CollectorRegistry())
    context = LoopContext(database=engine, times=Times().scaled(0.2), metrics=metrics)
    outbox = cast(Outbox, SimpleNamespace(wake=lambda: None))
    return Preparer(context, outbox=outbox, results=CeleryResults(context, backend_app=None))


def child_of(engine: Engine, prompt: str, names: dict[UUID, str | None], **fields: Any) -> UUID:
    waited = tuple(ParentJob(job=job, name=name) for job, name in names.items())
    with engine.begin() as connection:
        (stored,) = jobs.insert_jobs(
            connection, [request(prompt=prompt, depends_on=waited, **fields)]
        )
    return stored.job_id


def run(engine: Engine, job_id: UUID, said: str) -> None:
    """A head claims it, and it says this."""
    claimed = claim_one(engine, job_id)
    ended = success(claimed)
    assert ended.result is not None
    end_one(engine, dataclasses.replace(ended, result=replace(ended.result, text=said)))


def found(engine: Engine, job_id: UUID) -> Job:
    with engine.begin() as connection:
        job = jobs.get_job(connection, job_id)
    assert job is not None
    return job


def test_a_chain_of_three_hands_its_texts_on(engine: Engine, relay: Preparer) -> None:
    (first,) = submit(engine)
    second = child_of(engine, "one {{a}}", {first: "a"})
    third = child_of(engine, r"{{b}} \{{b}} {{c}} {{b}}", {second: "b", first: None})
    relay.turn()
    assert found(engine, second).prompt_token_ids is None
    # What a parent writes is text, whatever it looks like.
    run(engine, first, "two {{b}}")
    relay.turn()
    ids = found(engine, second).prompt_token_ids
    assert ids is not None
    assert ids[:2] == (ONE, TWO)
    assert found(engine, second).prompt == "one {{a}}"
    assert found(engine, third).prompt_token_ids is None
    run(engine, second, "three")
    relay.turn()

    filled = found(engine, third).prompt_token_ids
    assert filled is not None
    assert (filled[0], filled[-1], filled.count(THREE)) == (THREE, THREE, 2)


def test_ten_parents_and_rows_of_sql(engine: Engine, relay: Preparer) -> None:
    parents = submit(engine, 10)
    names = {job: f"p{place}" for place, job in enumerate(parents)}
    child = child_of(engine, " ".join(f"{{{{{name}}}}}" for name in names.values()), dict(names))
    change(
        engine,
        "INSERT INTO jobs (model, messages, depends_on) VALUES ('m',"
        ' \'[{"role": "user", "content": "{{x}}"}]\','
        " jsonb_build_array(jsonb_build_object('job', CAST(:job AS text), 'as', 'y')))",
        job=str(parents[0]),
    )
    for place, job in enumerate(parents):
        assert found(engine, child).prompt_token_ids is None
        run(engine, job, "two" if place % 2 else "one")
        relay.turn()
    assert found(engine, child).prompt_token_ids == (ONE, TWO) * 5
    with engine.begin() as connection:
        (error,) = connection.scalars(text("SELECT error FROM jobs WHERE state = 'failed'"))
    assert (error["field"], error["problem"]) == ("depends_on", "no text has {{y}}")


def test_the_failure_rule_and_a_text_that_is_too_long(engine: Engine, relay: Preparer) -> None:
    bad, good = submit(engine, 2)
    strict = child_of(engine, "one {{a}}", {bad: "a"})
    patient = child_of(engine, "one {{a}} two", {bad: "a"}, on_parent_failure="run")
    long = child_of(engine, "one {{a}}", {good: "a"})
    grandchild = child_of(engine, "one", {strict: None})
    with engine.begin() as connection:
        jobs.request_cancel(connection, [bad])
    run(engine, good, "two " * 40)
    relay.turn()
    relay.turn()

    error = found(engine, strict).error
    assert error is not None
    assert (error["code"], error["parent"]) == ("parent_failed", str(bad))
    assert found(engine, strict).state is JobState.FAILED
    assert found(engine, patient).prompt_token_ids == (ONE, TWO)
    error = found(engine, long).error
    assert error is not None
    assert (error["code"], error["field"]) == ("invalid_request", "prompt")
    error = found(engine, grandchild).error
    assert error is not None
    assert error["parent"] == str(strict)


def test_a_relay_that_dies_after_the_release_leaves_the_same_prompt(
    engine: Engine, relay: Preparer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (parent,) = submit(engine)
    child = child_of(engine, "one {{a}}", {parent: "a"})
    run(engine, parent, "two")

    def die(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(relay, "_mark", die)
    with pytest.raises(KeyboardInterrupt):
        relay.turn()
    assert found(engine, child).prompt_token_ids is None
    change(engine, "UPDATE jobs SET preparing_until = now() WHERE prepared_at IS NULL")
    new_relay(engine).turn()
    assert found(engine, child).prompt_token_ids == (ONE, TWO)
