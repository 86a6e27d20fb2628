"""A backup as operators make it, with pg_dump, read into an empty database: every row and rule is
there, and the jobs go on."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from sqlalchemy import Engine, make_url

from services.standalone.servers import postgres_program
from shardline.client import Client
from shardline.contract.job import JobState
from shardline.store.connection.database import connect
from shardline.store.schedules import schedule_rows
from shardline.store.schedules.schedule_rows import NewSchedule
from shardline.store.tenants.quotas import set_weight
from shardline_server.store import sweeps
from tests.integration.migrations.test_migrations import CONSTRAINTS, INDEXES, alembic, read
from tests.integration.rows import (
    MODEL,
    claim,
    database_with_head,
    end,
    end_one,
    pass_time,
    running,
    state,
    submit,
    success,
)

LEASE_S = 0.001
NO_PARENTHESES = str.maketrans("", "", "()")
TABLES = (
    "SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace"
)
TRIGGERS = "SELECT pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal ORDER BY 1"


def rows(engine: Engine) -> dict[str, list[str]]:
    """Every row of every table, as text."""
    return {
        table: read(engine, f'SELECT t::text FROM "{table}" AS t ORDER BY 1')
        for table in read(engine, TABLES)
    }


def rules(engine: Engine) -> list[str]:
    """Constraints, indexes and triggers. Postgres groups a condition anew when it reads it again,
    so that parentheses are left out."""
    found = [rule for query in (CONSTRAINTS, INDEXES, TRIGGERS) for rule in read(engine, query)]
    return [rule.translate(NO_PARENTHESES) for rule in found]


def run(program: str, *arguments: str) -> None:
    """A program of Postgres, to its end; it must succeed."""
    subprocess.run(
        [str(postgres_program(program)), *arguments], check=True, capture_output=True, text=True
    )


def libpq(url: str) -> str:
    """As Postgres's programs take it."""
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


@pytest.mark.parametrize("form", ["plain", "custom"])
def test_what_a_backup_holds_goes_on_in_another_database(
    database_url: str, empty_database_url: str, tmp_path: Path, form: str
) -> None:
    with database_with_head(database_url) as engine:
        ended, held = running(engine), running(engine)
        end_one(engine, success(ended))
        (parent,) = submit(engine)
        with Client(database_url=database_url) as client:
            child = client.submit(
                model=MODEL, prompt="{{a}}", depends_on=[{"job": parent, "as": "a"}]
            )
        with engine.begin() as connection:
            schedule = NewSchedule(
                name="nightly", cron="0 3 * * *", request={"model": MODEL, "prompt": "a"}
            )
            schedule_rows.create(connection, schedule)
            set_weight(connection, "default", 2.0)
        kept = rows(engine)
        kept_rules = rules(engine)
    dump = tmp_path / "backup"
    run("pg_dump", f"--format={form}", f"--file={dump}", libpq(database_url))
    if form == "plain":
        run("psql", "--set=ON_ERROR_STOP=1", f"--file={dump}", libpq(empty_database_url))
    else:
        run("pg_restore", "--exit-on-error", f"--dbname={libpq(empty_database_url)}", str(dump))

    assert "No new upgrade operations detected" in alembic(empty_database_url, "check")
    restored = connect(empty_database_url)
    assert rows(restored) == kept
    assert rules(restored) == kept_rules

    with restored.begin() as connection:
        pass_time(connection, held.job_id, "lease_until")
        sweeps.sweep_expired_leases(connection, str, lease_s=LEASE_S)
    again = claim(restored, [held.job_id, parent])
    end(restored, *map(success, again))
    states = [state(restored, each) for each in (ended.job_id, held.job_id, parent, child)]
    assert states == [JobState.SUCCEEDED] * 3 + [JobState.QUEUED]
    restored.dispose()
