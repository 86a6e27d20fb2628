"""The statement in docs/capacity.md: a trace of the jobs that a database has served, as the
simulator reads it."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest
from sqlalchemy import Engine

from shardline_fleet.simulator.arrivals import Arrival, read_trace
from tests.integration.rows import MODEL, change, claim, end, submit, success
from tests.repository import REPOSITORY

DOCUMENT = (REPOSITORY / "docs/capacity.md").read_text(encoding="utf-8")
STATEMENT = (
    DOCUMENT.partition("<<'SQL' > jobs.csv\n")[2].partition("SQL\n")[0].replace("clerk", MODEL)
)


def test_postgres_writes_a_trace_of_the_jobs_that_have_ended(
    engine: Engine, tmp_path: Path
) -> None:
    one, other, _ = submit(engine, 3)
    (claimed, later) = (claim(engine, [job_id])[0] for job_id in (one, other))
    end(engine, success(claimed, 7, 8, 9), success(later, 7, 8, 9, 7, 8))
    change(
        engine, "UPDATE jobs SET created_at = created_at - interval '90 s' WHERE id = :id", id=one
    )
    url = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with (
        psycopg.connect(url) as connection,
        connection.cursor().copy(f"COPY ({STATEMENT}) TO STDOUT CSV HEADER") as rows,
    ):
        (tmp_path / "jobs.csv").write_bytes(b"".join(rows))
    first, second = read_trace(tmp_path / "jobs.csv")
    assert (first, second.prompt, second.output) == (Arrival(at_s=0.0, prompt=2, output=3), 2, 5)
    assert second.at_s == pytest.approx(90.0, abs=5.0)
