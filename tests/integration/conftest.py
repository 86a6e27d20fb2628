"""A database with a model and a head for each test that asks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

from tests.integration.rows import database_with_head


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    """On a fresh database that knows one model and its head."""
    with database_with_head(database_url) as engine:
        yield engine
