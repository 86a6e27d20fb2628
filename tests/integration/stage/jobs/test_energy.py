"""What jobs took, from the engine's steps to the rows: by ends, by heartbeats of those that go on, and by tenant."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine as Database

from services.stage.engine.executor import Executor
from shardline.config import Times
from shardline.store import jobs
from tests.integration.rows import cell, database_with_head, request
from tests.integration.stage.jobs.lone_head import STEP_J, LoneHead, open_lone_head, tiny_executor
from tests.polling import until

LONG = 4_000
ENERGY = "SELECT energy_j FROM attempts"


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    with tiny_executor(tmp_path_factory.mktemp("energy")) as executor:
        yield executor


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    with database_with_head(database_url) as engine:
        yield engine


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


def counted(head: LoneHead) -> float | None:
    return head.meter.registry.get_sample_value("shardline_job_energy_joules_total", {"tenant": "default"})


def test_a_job_alone_takes_every_step_of_its_own(head: LoneHead, database: Database) -> None:
    offer(head, max_tokens=5)
    assert [head.verdict()[1] for _ in range(2)] == ["started", "succeeded"]

    assert cell(database, ENERGY) == pytest.approx(5 * STEP_J)
    assert cell(database, "SELECT energy_source FROM attempts") == "table"
    assert cell(database, "SELECT provenance -> 'stages' -> 0 ->> 'power' FROM results") == "table"
    assert counted(head) == pytest.approx(5 * STEP_J)


def test_what_a_job_took_so_far_is_saved_with_its_tokens(head: LoneHead, database: Database) -> None:
    offer(head, max_tokens=LONG)
    head.verdict()
    until(lambda: cell(database, "SELECT cardinality(tokens) FROM attempts") > 0)

    with database.begin() as connection:
        num_tokens, energy_j = connection.exec_driver_sql("SELECT cardinality(tokens), energy_j FROM attempts").one()
    assert energy_j == pytest.approx(num_tokens * STEP_J)
    head.lease_manager.give_back()
    until(lambda: cell(database, "SELECT outcome IS NOT NULL FROM attempts"))
    assert cell(database, ENERGY) >= energy_j
    assert counted(head) == pytest.approx(cell(database, ENERGY))
