"""`shardline cancel | retry | prioritize` over a filter, against real Postgres: counted, confirmed,
done."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Engine
from typer.testing import CliRunner, Result

from shardline.cli import bulk_acts
from shardline.cli.commands import cli
from shardline.client import AsyncClient, Client
from shardline.contract.job import JobState
from tests.integration.rows import change, database_with_head, state, submit

Shardline = Callable[..., Result]


@pytest.fixture
def database(database_url: str) -> Iterator[Engine]:
    with database_with_head(database_url) as engine:
        yield engine


@pytest.fixture
def shardline(database_url: str) -> Shardline:
    def run(*arguments: object, stdin: str | None = None) -> Result:
        env = {"SHARDLINE_DATABASE_URL": database_url}
        return CliRunner().invoke(cli, [str(each) for each in arguments], env=env, input=stdin)

    return run


def test_jobs_that_match_are_counted_then_cancelled_then_retried(
    database: Engine, shardline: Shardline
) -> None:
    mine = submit(database, 2, metadata={"team": "a", "run": 7})
    (other,) = submit(database)
    where = ("--where", "metadata.team=a", "-w", "metadata.run=7", "-w", "model=m")

    counted = shardline("cancel", *where, "--dry-run")
    assert (counted.exit_code, counted.stdout) == (0, "2 jobs would be cancelled\n")
    assert state(database, mine[0]) is JobState.QUEUED

    assert shardline("cancel", *where).stdout == "2 jobs cancelled\n"
    assert [state(database, job_id) for job_id in mine] == [JobState.CANCELLED] * 2
    assert shardline("cancel", *where).stdout == "0 jobs cancelled\n"

    retried = shardline("retry", "-w", "state=cancelled", "--json")
    assert json.loads(retried.stdout) == {"changed": 2, "dry_run": False}
    assert shardline("prioritize", 1, other).stdout == "1 jobs prioritized\n"


def test_many_jobs_are_changed_only_after_a_yes(
    database: Engine, shardline: Shardline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_acts, "ASKED_ABOVE", 1)
    (first, *_) = submit(database, 2)
    for refused in (
        shardline("cancel", "-w", "state=queued", stdin="n\n"),
        shardline("cancel", "-w", "state=queued"),
    ):
        assert refused.exit_code != 0
        assert "2 jobs will be cancelled" in refused.stderr
    assert state(database, first) is JobState.QUEUED
    agreed = shardline("prioritize", 2, "-w", "state=queued", stdin="y\n")
    assert agreed.stdout.endswith("2 jobs prioritized\n")
    assert shardline("cancel", "-w", "state=queued", "--yes").stdout == "2 jobs cancelled\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("cancel",),
        ("retry",),
        ("prioritize", 3),
        ("cancel", "-w", "model"),
        ("cancel", "-w", "modell=m"),
        ("cancel", "-w", "state=succeeded"),
        ("prioritize", 11, "-w", "model=m"),
    ],
    ids=lambda each: " ".join(map(str, each)),
)
def test_what_would_be_every_job_or_no_filter_is_refused(
    database: Engine, shardline: Shardline, arguments: tuple[object, ...]
) -> None:
    (job_id,) = submit(database)
    ran = shardline(*arguments)
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert state(database, job_id) is JobState.QUEUED


async def test_both_clients_act_on_what_matches(database: Engine, database_url: str) -> None:
    ids = submit(database, 3)
    with Client(database=database) as client:
        assert client.prioritize_where({"model": "m"}, 1, dry_run=True) == 3
        assert client.prioritize_where({"model": "m"}, 1) == 3
        assert client.cancel_where({"ids": [str(ids[0])]}) == 1
    change(
        database,
        "UPDATE jobs SET state = 'failed', finished_at = now() WHERE id = :id",
        id=ids[1],
    )
    async with AsyncClient(database_url=database_url) as asynchronous:
        assert await asynchronous.retry_where({"model": "m"}) == 1
        assert await asynchronous.cancel_where({"model": "m"}, dry_run=True) == 2
        assert await asynchronous.cancel_where({"model": "m"}) == 2
        assert await asynchronous.prioritize_where({"model": "m"}, 4) == 0
