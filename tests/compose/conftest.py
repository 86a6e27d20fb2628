"""One engine for all Compose tests, one stack for each file; both are removed at the end, however
they went."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.compose.engine import Docker, find_or_start
from tests.compose.stack import Stack, until


@pytest.fixture(scope="session")
def docker() -> Iterator[Docker]:
    """An engine that runs."""
    docker = find_or_start()
    yield docker
    docker.stop()


@pytest.fixture(scope="module")
def stack(docker: Docker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """`docker compose up -d --wait`, with one replica of everything, ready to generate."""
    stack = Stack(docker, tmp_path_factory.mktemp("compose"))
    stack.build()
    try:
        stack.up()
        until(
            lambda: stack.number("SELECT count(*) FROM pipelines WHERE ready_at IS NOT NULL") == 1
        )
        yield stack
    finally:
        # Shown beside a failure.
        print(stack.compose("logs", "--tail=100"))
        stack.remove()
