"""The queries of KEDA's manifest on a real Postgres: one number each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml
from sqlalchemy import Engine

from docker.kubernetes.__main__ import FOLDER
from tests.integration.rows import cell, change, claim, database_with_head, submit


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    with database_with_head(database_url) as engine:
        yield engine


def asked(engine: Engine) -> list[float]:
    """Seconds of the oldest queued job, and running jobs, as KEDA gets them."""
    manifests = yaml.safe_load_all((FOLDER / "keda" / "stage.yaml").read_text(encoding="utf-8"))
    (scaled,) = (each for each in manifests if each["kind"] == "ScaledObject")
    return [
        float(cell(engine, trigger["metadata"]["query"])) for trigger in scaled["spec"]["triggers"]
    ]


def test_autoscaling_asks_for_the_oldest_wait_and_the_running_jobs(engine: Engine) -> None:
    assert asked(engine) == [0.0, 0.0]

    running = submit(engine, 2)
    waiting = submit(engine, 3)
    change(
        engine,
        "UPDATE jobs "
        "SET created_at = now() - interval '90 s', not_before = now() - interval '90 s'",
    )
    claim(engine, running)
    oldest_s, num_running = asked(engine)
    assert 90 <= oldest_s < 900
    assert num_running == 2

    claim(engine, waiting)
    assert asked(engine) == [0.0, 5.0]
