"""A gateway with a head that tests drive by hand, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from tests.integration.gateway.running_gateway import running_gateway
from tests.tiny_head import TinyHead, tiny_head


@pytest.fixture
def head(database_url: str, redis_url: str) -> Iterator[TinyHead]:
    """A head that is ready."""
    with tiny_head(database_url, redis_url) as head:
        yield head


@pytest.fixture
async def http(
    database_url: str, redis_url: str, head: TinyHead
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway with default settings, beside the test's own head."""
    async with running_gateway(database_url, redis_url) as http:
        yield http
