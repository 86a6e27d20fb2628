"""`shardline doctor` and `shardline top` against real Postgres and Valkey: what is there, what is
not, and what runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from typer.testing import CliRunner, Result

from services.standalone.servers import Valkey
from shardline.cli.commands import cli
from shardline.store.connection.database import transaction
from tests.tiny_head import TinyHead, tiny_head

ENERGY = text("""
INSERT INTO pipeline_energy (pipeline, epoch, source, energy_j, num_rows)
SELECT id, epoch, 'table', 5, 100 FROM pipelines ON CONFLICT DO NOTHING
""")
UNREADY = text("UPDATE pipelines SET ready_at = NULL")
LATE = text("""
INSERT INTO jobs (model, prompt_ids, max_tokens, prepared_at, created_at, not_before)
SELECT 'clerk', ARRAY[5], 1, now(), before, before
FROM (SELECT now() - interval '1 minute' AS before) AS clock
""")
CHILD = text("""
INSERT INTO jobs (model, prompt, depends_on)
SELECT 'clerk', 'a', jsonb_build_array(jsonb_build_object('job', id)) FROM jobs
""")


@pytest.fixture
def shardline(database_url: str, redis_url: str) -> Callable[..., Result]:
    urls = {"SHARDLINE_DATABASE_URL": database_url, "SHARDLINE_REDIS_URL": redis_url}

    def run(*arguments: str, **changed: str) -> Result:
        return CliRunner().invoke(cli, arguments, env=urls | changed)

    return run


@pytest.fixture
def head(database_url: str, redis_url: str) -> Iterator[TinyHead]:
    with tiny_head(database_url, redis_url) as head:
        yield head


def documents(ran: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ran.stdout.splitlines()]


def verdicts(ran: Result) -> dict[str, str]:
    """Without the disk's, which may be full where tests run."""
    return {each["name"]: each["verdict"] for each in documents(ran) if each["name"] != "disk"}


def test_doctor_says_what_is_not_there(shardline: Callable[..., Result], database_url: str) -> None:
    ran = shardline("doctor", "--json")
    assert ran.exit_code == 1
    assert verdicts(ran) == {
        "postgres": "ok",
        "clock of postgres": "ok",
        "schema": "ok",
        "rights": "ok",
        "relay": "ok",
        "models": "broken",
        "redis": "ok",
        "clock of redis": "ok",
    }


def test_doctor_names_a_schema_that_is_not_migrated(
    shardline: Callable[..., Result], empty_database_url: str
) -> None:
    ran = shardline("doctor", SHARDLINE_DATABASE_URL=empty_database_url)
    assert ran.exit_code == 1
    assert "alembic upgrade head" in ran.stdout


def test_doctor_finds_servers_that_are_away(shardline: Callable[..., Result]) -> None:
    away = {
        "SHARDLINE_DATABASE_URL": "postgresql://shardline@127.0.0.1:1/shardline",
        "SHARDLINE_REDIS_URL": "redis://127.0.0.1:1/0",
    }
    ran = shardline("doctor", "--json", **away)
    assert ran.exit_code == 1
    assert verdicts(ran) == {"postgres": "broken", "redis": "broken"}
    assert all(each["remedy"] for each in documents(ran) if each["verdict"] == "broken")


def test_doctor_finds_transactions_that_only_read_by_default(
    shardline: Callable[..., Result], database_url: str
) -> None:
    with transaction(database_url) as connection:
        name = connection.scalar(text("SELECT current_database()"))
        connection.execute(text(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on'))
    ran = shardline("doctor", "--json")
    assert verdicts(ran)["postgres"] == "broken"
    assert "default_transaction_read_only" in documents(ran)[0]["remedy"]


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [
        ({"cluster-enabled": "yes"}, "without cluster mode"),
        ({"replicaof": "127.0.0.1 1"}, "primary"),
    ],
    ids=["cluster", "replica"],
)
def test_doctor_finds_a_redis_that_cannot_serve(
    shardline: Callable[..., Result], tmp_path: Path, setting: dict[str, str], remedy: str
) -> None:
    server = Valkey(tmp_path, settings=setting)
    server.start()
    try:
        ran = shardline("doctor", "--json", SHARDLINE_REDIS_URL=server.url)
    finally:
        server.kill()
    assert verdicts(ran)["redis"] == "broken"
    assert remedy in next(one["remedy"] for one in documents(ran) if one["name"] == "redis")


@pytest.mark.usefixtures("head")
def test_doctor_misses_a_relay_and_a_pipeline(
    shardline: Callable[..., Result], database_url: str
) -> None:
    ran = shardline("doctor")
    assert (ran.exit_code, "model clerk" in ran.stdout) == (0, True), ran.stdout

    with transaction(database_url) as connection:
        connection.execute(LATE)
    assert verdicts(shardline("doctor", "--json"))["relay"] == "broken"

    with transaction(database_url) as connection:
        connection.execute(UNREADY)
    assert verdicts(shardline("doctor", "--json"))["model clerk"] == "broken"


@pytest.mark.usefixtures("head")
def test_top_shows_models_pipelines_and_tenants(
    shardline: Callable[..., Result], database_url: str
) -> None:
    with transaction(database_url) as connection:
        connection.execute(ENERGY)
        connection.execute(LATE)
        connection.execute(CHILD)
    (look,) = documents(shardline("top", "--once", "--json", "--every", "0.5"))
    (model,) = look["models"]
    counts = {"num_queued": 1, "num_running": 0, "num_paused": 0, "num_waiting": 1}
    assert model["jobs"] == counts
    assert model["oldest_s"] >= 60
    (pipeline,) = look["pipelines"]
    assert pipeline["pipeline"]["ready"]
    assert (pipeline["num_running"], pipeline["tokens_per_s"]) == (0, 0)
    assert look["tenants"] == {"default": counts}

    ran = shardline("top", "--once", "--every", "0.5")
    assert (ran.exit_code, "clerk" in ran.stdout, "default" in ran.stdout) == (0, True, True)
