"""Workers without a number: they get their layers from the fleet's plan, and other ones while jobs
run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from celery import Celery
from sqlalchemy import Engine, text

from services.standalone.cores import usable_cores
from shardline.client import Client
from shardline.store import fleets
from shardline.store.models import versions
from tests.fleet import MODEL, keep_busy, layers, plan, start_third
from tests.polling import until
from tests.stack import ForkedStack, Stack

PROMPTS = [f"sort: {number}, 7, {number + 4}, 2, 9 =" for number in range(8)]
PARAMS: dict[str, Any] = {"max_tokens": 200, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A fleet of two workers, which share all cores, so that a third may too."""
    folder = tmp_path_factory.mktemp("fleet")
    settings = {
        "WORKERS": 2,
        "STAGE_CORES": len(usable_cores()),
        "TIME_SCALE": 0.3,
        "CACHE_DIR": folder / "cache",
    }
    named = {f"SHARDLINE_{name}": str(value) for name, value in settings.items()}
    stack = ForkedStack(folder, **named)
    stack.start()
    yield stack
    stack.end()
    assert stack.left() == []


def replan(database: Engine, split: list[tuple[int, int]]) -> None:
    """As a coordinator does; each worker has the place of its number. None finds a better plan for
    an hour."""
    stages = {worker: number for number, worker in enumerate(sorted(plan(database).stages))}
    with database.begin() as connection:
        version = fleets.plan_of(connection, MODEL).version
        assert fleets.store_plan(
            connection, MODEL, version=version, split=split, stages=stages, tokens_per_s=None
        )
        connection.execute(text("UPDATE plans SET made_at = now() + interval '1 hour'"))


def outputs(client: Client, ids: Sequence[UUID]) -> list[tuple[int, ...]]:
    found = [job.result for job in client.wait(ids, 120)]
    return [result.token_ids for result in found if result is not None]


def test_workers_get_the_stages_of_one_plan(stack: Stack, database: Engine) -> None:
    until(lambda: len(plan(database).stages) == 2, timeout_s=60)
    found = plan(database)
    assert set(found.stages.values()) == set(range(len(found.split)))
    until(lambda: set(layers(database)) == set(found.split), timeout_s=60)
    assert stack.complete().status_code == 200


def test_layers_move_under_running_jobs_and_no_token_changes(
    database: Engine, client: Client
) -> None:
    replan(database, before := [(0, 4), (4, 8)])
    until(lambda: layers(database) == before, timeout_s=60)
    expected = outputs(
        client, [client.submit(MODEL, prompt=prompt, **PARAMS) for prompt in PROMPTS]
    )
    replan(database, after := [(0, 6), (6, 8)])
    ids: list[UUID] = []

    def moved() -> bool:
        rest = len(ids) % len(PROMPTS)
        ids.extend(keep_busy(database, client, [*PROMPTS[rest:], *PROMPTS[:rest]], PARAMS))
        return layers(database) == after

    until(moved, timeout_s=60)
    for number, found in enumerate(outputs(client, ids)):
        assert found == expected[number % len(PROMPTS)]
    assert max(client.get(job_id).fence for job_id in ids) > 1, (
        "no job was under way when the layers moved"
    )


def test_a_killed_worker_comes_back_to_its_layers(
    stack: Stack, database: Engine, client: Client
) -> None:
    before = plan(database)
    split = layers(database)
    ids = [client.submit(MODEL, prompt=prompt, **PARAMS) for prompt in PROMPTS]
    next(iter(client.stream(ids[0])))
    os.kill(stack.look()["processes"]["worker-1"], signal.SIGKILL)
    assert len(outputs(client, ids)) == len(ids)
    until(lambda: layers(database) == split, timeout_s=60)
    assert plan(database).version == before.version


def test_a_worker_without_the_model_joins_and_is_missed_when_it_leaves(
    stack: Stack, database: Engine, tmp_path: Path
) -> None:
    """It copies the model from one that has it, and gets a stage."""
    before = plan(database)
    third = start_third(stack, MODEL=f"peer:{MODEL}", CACHE_DIR=str(tmp_path))
    try:
        until(lambda: len(plan(database).stages) == 3, timeout_s=60)
        (name,) = set(plan(database).stages) - set(before.stages)
        assert name.startswith("third@")
        with Celery(broker=stack.urls["redis"], set_as_current=False) as app:
            until(lambda: app.control.ping(destination=[name], timeout=1, limit=1), timeout_s=60)
        (copy,) = (each for each in (tmp_path / "peers").iterdir() if each.is_dir())
        with database.connect() as connection:
            assert versions(connection) == {MODEL: copy.name}
    finally:
        third.terminate()
        assert third.wait(60) == 0
    with database.connect() as connection:
        assert name not in {member.worker for member in fleets.workers_of(connection, MODEL)}
