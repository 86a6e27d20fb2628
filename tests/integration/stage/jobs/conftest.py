"""What a head's jobs are tested with: a tiny engine for each file, and a database whose head
lives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine as Database

from services.stage.engine.executor import Executor
from tests.integration.rows import database_with_head
from tests.integration.stage.jobs.lone_head import tiny_executor


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
