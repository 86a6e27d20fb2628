"""What a head's jobs are tested with: a tiny engine for each file, and a database whose head
lives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine as Database

from services.stage.engine.executor import Executor
from shardline.base.config import Times
from tests.integration.rows import database_with_head
from tests.integration.stage.jobs.lone_head import TIMES, LoneHead, open_lone_head, tiny_executor


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    """A tiny model with a long context."""
    with tiny_executor(tmp_path_factory.mktemp("executor")) as executor:
        yield executor


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """It has a pipeline that is ready."""
    with database_with_head(database_url) as engine:
        yield engine


@pytest.fixture
def times() -> Times:
    """The protocol's, shorter; tests override it."""
    return TIMES


@pytest.fixture
def head(
    database: Database, executor: Executor, redis_url: str, times: Times
) -> Iterator[LoneHead]:
    """Ready to take jobs."""
    with open_lone_head(database, executor, redis_url, times) as head:
        yield head
