"""Three models on two workers, each of which may serve all: jobs of each end, whoever's turn it
is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, text

from services.standalone.cores import usable_cores
from services.standalone.settings import CLERK
from shardline.client import Client
from shardline.store import fleets
from tests.polling import until
from tests.stack import ForkedStack, Stack

MODELS = ("clerk", "second", "third")
PARAMS: dict[str, Any] = {"max_tokens": 48, "temperature": 0, "ignore_eos": True}
IN_TWO_PLANS = text(
    "SELECT worker FROM plans, jsonb_object_keys(stages) AS worker"
    " GROUP BY worker HAVING count(*) > 1"
)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("turns")
    settings = {
        "WORKERS": 2,
        "STAGE_CORES": len(usable_cores()),
        "TIME_SCALE": 0.2,
        "CACHE_DIR": folder / "cache",
        "FURTHER_MODELS": ",".join(f"{name}={CLERK}" for name in MODELS[1:]),
    }
    named = {f"SHARDLINE_{name}": str(value) for name, value in settings.items()}
    stack = ForkedStack(folder, **named)
    stack.start()
    yield stack
    stack.end()
    assert stack.left() == []


def test_jobs_of_three_models_end_on_two_workers(database: Engine, client: Client) -> None:
    """All models always have jobs, until each has had a turn after another one's."""
    ids = {model: [client.submit(model, prompt="sort: 3, 1, 2 =", **PARAMS)] for model in MODELS}
    turns: list[frozenset[str]] = []

    def all_had_turns() -> bool:
        """Another job for each model whose last one has ended; who has workers now."""
        for model, jobs in ids.items():
            if client.get(jobs[-1]).result is not None:
                jobs.append(client.submit(model, prompt="sort: 3, 1, 2 =", **PARAMS))
        with database.connect() as connection:
            assert connection.execute(IN_TWO_PLANS).all() == []
            now = frozenset(
                name for name, plan in fleets.all_plans(connection).items() if plan.stages
            )
        if now and turns[-1:] != [now]:
            turns.append(now)
        return all(_turns_of(model, turns) >= 2 for model in MODELS)

    until(all_had_turns, look_s=0.2)
    found = [job.result for jobs in ids.values() for job in client.wait(jobs, 300)]
    assert len({result.token_ids for result in found if result is not None}) == 1, (
        "they are one model by three names"
    )
    assert None not in found


def _turns_of(model: str, turns: list[frozenset[str]]) -> int:
    """How often it got workers."""
    return sum(
        model in now and (not place or model not in turns[place - 1])
        for place, now in enumerate(turns)
    )
