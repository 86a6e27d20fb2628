"""A fleet of unlike workers: one that holds the model alone, and two that hold it together, serve
side by side."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, text

from services.standalone.cores import usable_cores
from shardline.client import Client
from shardline.store import fleets
from tests.fleet import BACKLOG, MODEL, layers, plan, start_third
from tests.polling import until
from tests.stack import ForkedStack, Stack
from tests.unit.fleet.planner.fleets import device

SMALL_MIB = 14
LARGE_MIB = 512
"""The model has 13 MiB, and the KV of one request 4: two small workers hold it with some requests,
one does not."""
PARAMS: dict[str, Any] = {"max_tokens": 100, "temperature": 0, "ignore_eos": True}
PROMPT = "sort: 3, 7, 4, 2, 9 ="
HEADS = text("SELECT DISTINCT worker FROM attempts WHERE job_id = ANY(:ids)")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("unlike")
    settings = {
        "WORKERS": 2,
        "STAGE_CORES": len(usable_cores()),
        "MEMORY_MIB": SMALL_MIB,
        "TIME_SCALE": 0.3,
        "CACHE_DIR": folder / "cache",
    }
    named = {f"SHARDLINE_{name}": str(value) for name, value in settings.items()}
    stack = ForkedStack(folder, **named)
    stack.start()
    yield stack
    stack.end()
    assert stack.left() == []


def answers(client: Client, num: int) -> tuple[list[UUID], set[tuple[int, ...]]]:
    """Of as many equal jobs: their ids, and the tokens of their results."""
    ids = [client.submit(MODEL, prompt=PROMPT, **PARAMS) for _ in range(num)]
    results = [job.result for job in client.wait(ids, 120)]
    return ids, {result.token_ids for result in results if result is not None}


def heads(database: Engine, ids: list[UUID]) -> set[str]:
    with database.connect() as connection:
        return set(connection.scalars(HEADS, {"ids": ids}))


def set_profiles(database: Engine) -> None:
    """As workers do whose devices have drifted: all are as fast, so that no figure of a busy
    machine decides."""
    with database.begin() as connection:
        for member in fleets.workers_of(connection, MODEL):
            memory_mib = LARGE_MIB if member.worker.startswith("third") else SMALL_MIB
            profile = device(member.worker, hardware="core", memory_bytes=memory_mib << 20)
            fleets.refresh(connection, member.worker, MODEL, profile)


def num_workers(database: Engine) -> int:
    with database.connect() as connection:
        return len(fleets.workers_of(connection, MODEL))


def hold_plan(database: Engine) -> None:
    """None finds a better one for an hour."""
    with database.begin() as connection:
        connection.execute(text("UPDATE plans SET made_at = now() + interval '1 hour'"))


class Third:
    """The worker that holds the model alone. It is started again when it ends, as a supervisor
    does."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._process = self._start()

    def keep(self) -> None:
        if self._process.poll() is not None:
            self._process = self._start()

    def end(self) -> int:
        self._process.terminate()
        return self._process.wait(60)

    def _start(self) -> subprocess.Popen[bytes]:
        return start_third(self._stack, MEMORY_MIB=str(LARGE_MIB))


def test_pipelines_of_unlike_workers_form_and_answer_side_by_side(
    stack: Stack, database: Engine, client: Client
) -> None:
    pair = plan(database)
    assert len(pair.split) == 2, "one small worker does not hold the model"
    _, expected = answers(client, 1)
    third = Third(stack)
    try:
        until(lambda: num_workers(database) == 3, timeout_s=60)
        set_profiles(database)
        until(lambda: len(plan(database).split) == 3, timeout_s=60)
        hold_plan(database)
        found = plan(database)
        alone = found.split.index((0, 8))
        assert {worker for worker, place in found.stages.items() if place != alone} == set(
            pair.stages
        )

        def all_serve() -> bool:
            third.keep()
            return sorted(layers(database)) == sorted(found.split)

        until(all_serve, timeout_s=60)
        ids, tokens = answers(client, BACKLOG)
        assert tokens == expected
        assert len(heads(database, ids)) == 2
    finally:
        assert third.end() == 0
    ids, tokens = answers(client, BACKLOG // 4)
    assert tokens == expected
    assert len(heads(database, ids)) == 1
    assert plan(database).version == found.version, "the pair serves on"
