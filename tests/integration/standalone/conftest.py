"""What tests of a module's own `stack` look at it with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

from shardline.client import Client
from shardline.store.connection.database import connect
from tests.stack import Stack


@pytest.fixture(scope="module")
def database(stack: Stack) -> Iterator[Engine]:
    engine = connect(stack.urls["database"])
    yield engine
    engine.dispose()


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[Client]:
    with Client(database_url=stack.urls["database"], redis_url=stack.urls["redis"]) as client:
        yield client
