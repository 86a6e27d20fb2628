"""What jobs took: token rows, which share what the pipeline took; and time, as callers see it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine as Database

from services.stage.engine.executor import Executor
from shardline.base.config import Times
from shardline.store import jobs
from shardline.store.statistics.costs import EpochEnergy, put_epoch_energy
from tests.integration.rows import cell, request
from tests.integration.stage.jobs.lone_head import LoneHead, open_lone_head
from tests.polling import until


@pytest.fixture
def head(database: Database, executor: Executor, redis_url: str) -> Iterator[LoneHead]:
    with open_lone_head(database, executor, redis_url, Times().scaled(0.2)) as head:
        yield head


def offer(head: LoneHead, max_tokens: int) -> None:
    """One job that runs to its limit."""
    wanted = request(max_tokens=max_tokens, ignore_eos=True, seed=5)
    with head.database.begin() as connection:
        stored = jobs.insert_jobs(connection, [wanted], prepared=[((5, 6), max_tokens)])
    head.offer(stored[0].job_id)


def test_rows_are_those_that_the_engine_computed_and_that_sql_counts(
    head: LoneHead, database: Database, redis_url: str
) -> None:
    offer(head, max_tokens=900)
    head.verdict()
    until(lambda: cell(database, "SELECT cardinality(tokens) FROM attempts") > 0)
    head.lease_manager.give_back()
    until(lambda: cell(database, "SELECT state = 'queued' FROM jobs"))
    with open_lone_head(database, head.executor, redis_url, Times().scaled(0.2)) as other:
        other.offer(cell(database, "SELECT id FROM jobs"))
        until(lambda: other.rows)

        assert other.rows == [2 + 900 - 1]
        assert head.rows[0] <= head.engine.progress.num_tokens
        assert other.engine.progress.num_tokens == other.rows[0]
    with database.begin() as connection:
        energy = EpochEnergy(pipeline="p", epoch=1, source="any", energy_j=7.0, num_rows=7)
        put_epoch_energy(connection, energy)
    assert cell(database, "SELECT energy_j FROM job_costs") == head.rows[0] + other.rows[0]


def seconds(head: LoneHead, name: str, **labels: str) -> float:
    """The sum of one of the histograms of jobs."""
    value = head.meter.registry.get_sample_value(
        f"shardline_job_{name}_sum", {"model": "m", **labels}
    )
    assert value is not None
    return value


def test_a_committed_job_is_in_the_histograms_of_its_times(head: LoneHead) -> None:
    offer(head, max_tokens=12)
    assert [head.verdict()[1] for _ in range(2)] == ["started", "succeeded"]

    until(lambda: seconds(head, "seconds", outcome="succeeded") > 0)
    whole_s = seconds(head, "seconds", outcome="succeeded")
    first_s = seconds(head, "first_token_seconds")
    assert 0 < first_s < whole_s
    assert 0 < seconds(head, "token_seconds") < whole_s - first_s


def test_the_first_token_of_a_resumed_job_came_in_an_earlier_attempt(
    head: LoneHead, database: Database, redis_url: str
) -> None:
    offer(head, max_tokens=600)
    head.verdict()
    until(lambda: cell(database, "SELECT cardinality(tokens) FROM attempts") > 0)
    head.lease_manager.give_back()
    until(lambda: cell(database, "SELECT state = 'queued' FROM jobs"))
    with open_lone_head(database, head.executor, redis_url, Times().scaled(0.2)) as other:
        other.offer(cell(database, "SELECT id FROM jobs"))
        until(lambda: seconds(other, "seconds", outcome="succeeded") > 0)
        assert seconds(other, "first_token_seconds") == 0
        assert seconds(other, "token_seconds") > 0
