"""Retention on a real Postgres: what ended long ago goes with all that belongs to it, and nothing
else goes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import Engine, text
from structlog.testing import capture_logs

from services.relay.loop import LoopContext
from services.relay.retention import Retention
from shardline.base.config import Times
from shardline.contract.job import JobState
from shardline.store import dead_letters, fleets, pipelines
from shardline.store.fleets import WorkerOffer
from shardline_server.metrics import RelayMetrics
from shardline_server.store import retention
from shardline_server.store.retention import delete_old
from tests.integration.relay.relay_stack import relay_stack
from tests.integration.rows import cell, change, claim, end, running, submit, success
from tests.polling import until

DAY_S = 86_400.0
DEAD = """
UPDATE jobs
SET state = 'failed', finished_at = now(), lease_until = NULL, error = '{"code": "crashed"}'
WHERE id = :id
"""
BATCH = """
-- One that ended 29 days ago.
WITH made AS (
    INSERT INTO batches (id, tenant_id, endpoint, input_file_id, completion_window, status,
        expires_at, completed_at, num_lines, last_line, next_line, next_byte, first_open, fence)
    VALUES (gen_random_uuid(), 'default', '/v1/completions', gen_random_uuid(), '24h', 'completed',
        now(), now() - interval '29 days', 1, 1, 2, 9, 2, 1)
    RETURNING id
)
INSERT INTO batch_lines (batch_id, line, job_id, num_jobs, num_choices)
SELECT made.id, 1, :id, 1, 1 FROM made
"""


def age(engine: Engine, job_id: UUID, *, days: float) -> UUID:
    """As if all of it had happened so long ago."""
    times = ", ".join(
        f"{column} = {column} - make_interval(secs => :age_s)"
        for column in ("created_at", "not_before", "finished_at")
    )
    change(engine, f"UPDATE jobs SET {times} WHERE id = :id", id=job_id, age_s=days * DAY_S)
    return job_id


def ended(engine: Engine, *, days: float, state: JobState = JobState.SUCCEEDED) -> UUID:
    """A job with an attempt and a result."""
    claimed = running(engine)
    end(engine, replace(success(claimed), state=state))
    return age(engine, claimed.job_id, days=days)


def many(engine: Engine, num: int, end: str) -> None:
    """So many jobs that were created forty days ago; `end` is their state and when they ended."""
    columns = "(model, prompt, created_at, state, finished_at)"
    values = f"'m', 'text', now() - interval '40 days', {end}"
    change(engine, f"INSERT INTO jobs {columns} SELECT {values} FROM generate_series(1, {num})")


def dead(engine: Engine, *, days: float) -> UUID:
    """A dead letter."""
    claimed = running(engine)
    change(engine, DEAD, id=claimed.job_id)
    return age(engine, claimed.job_id, days=days)


def replayed(engine: Engine, dead_id: UUID) -> UUID:
    """Its replay, queued."""
    with engine.begin() as connection:
        return dead_letters.replay(connection, dead_id)


def clean(engine: Engine, max_batch: int = retention.MAX_BATCH) -> int:
    """One batch of what ended more than thirty days ago."""
    with engine.begin() as connection:
        return delete_old(connection, age_s=30 * DAY_S, max_batch=max_batch).num_deleted


def left(engine: Engine) -> set[UUID]:
    """Jobs that are there."""
    with engine.begin() as connection:
        return set(connection.scalars(text("SELECT id FROM jobs")))


@pytest.mark.parametrize("state", [state for state in JobState if state.terminal])
def test_old_ended_jobs_are_deleted_with_attempts_and_results(
    engine: Engine, state: JobState
) -> None:
    ended(engine, days=31, state=state)
    young = ended(engine, days=29, state=state)

    assert clean(engine) == 1

    assert left(engine) == {young}
    for table in ("attempts", "results"):
        assert cell(engine, f"SELECT array_agg(job_id) FROM {table}") == [young]


def test_a_batch_keeps_its_jobs_until_it_goes_itself(engine: Engine) -> None:
    old = ended(engine, days=40)
    change(engine, BATCH, id=old)
    assert clean(engine) == 0

    change(engine, "UPDATE batches SET completed_at = completed_at - interval '2 days'")

    assert clean(engine) == 1
    counts = [cell(engine, f"SELECT count(*) FROM {name}") for name in ("batches", "batch_lines")]
    assert counts == [0, 0]


def add_file(engine: Engine, created: str, uploaded: str, expires: str, num_bytes: int = 0) -> None:
    columns = "(id, tenant_id, filename, purpose, bytes, created_at, uploaded_at, expires_at)"
    times = f"{created}, {uploaded}, {expires}"
    values = f"gen_random_uuid(), 'default', 'a', 'batch', {num_bytes}, {times}"
    change(engine, f"INSERT INTO files {columns} VALUES ({values})")


EXPIRED = ("now()", "now()", "now() - interval '1 second'")
BROKEN_OFF = ("now() - interval '2 days'", "NULL", "NULL")


def test_files_go_once_they_have_expired_or_broke_off_a_day_ago(engine: Engine) -> None:
    add_file(engine, "now()", "now()", "now() + interval '1 hour'")
    add_file(engine, "now()", "NULL", "NULL")
    add_file(engine, *EXPIRED)
    add_file(engine, *BROKEN_OFF)
    with engine.begin() as connection:
        assert not retention.prune_files(connection)
    assert cell(engine, "SELECT count(*) FROM files") == 2


def test_large_files_go_a_few_at_a_time(engine: Engine) -> None:
    for times in (EXPIRED, EXPIRED, BROKEN_OFF, BROKEN_OFF):
        add_file(engine, *times, num_bytes=retention.MAX_BYTES - 1)
    loop = retention_loop(engine, days=0)
    left = []
    for pause_s in (0.0, 60.0):
        assert loop.turn() == pause_s
        left.append(cell(engine, "SELECT count(*) FROM files"))
    assert left == [2, 0]


def test_files_that_cannot_be_deleted_keep_no_job(engine: Engine) -> None:
    add_file(engine, *EXPIRED)
    change(engine, "CREATE TABLE readers (id uuid REFERENCES files)")
    change(engine, "INSERT INTO readers SELECT id FROM files")
    ended(engine, days=31)

    with capture_logs() as said:
        retention_loop(engine, days=30).turn()

    assert left(engine) == set()
    assert [line["sqlstate"] for line in said if "sqlstate" in line] == ["23503"]


def test_jobs_that_have_not_ended_stay_however_old(engine: Engine) -> None:
    (queued,) = submit(engine)
    (taken,) = submit(engine)
    claim(engine, [taken])
    for job_id in (queued, taken):
        age(engine, job_id, days=400)
    late = age(engine, submit(engine)[0], days=400)
    end(engine, success(claim(engine, [late])[0]))

    assert clean(engine) == 0
    assert left(engine) == {queued, taken, late}


def test_only_old_replayed_dead_letters_are_deleted(engine: Engine) -> None:
    alone = dead(engine, days=400)
    old = dead(engine, days=31)
    young = dead(engine, days=1)
    replays = {replayed(engine, old), replayed(engine, young)}

    assert clean(engine) == 1

    assert left(engine) == {alone, young, *replays}


def test_an_old_replay_is_deleted_only_after_its_dead_letter(engine: Engine) -> None:
    letter = dead(engine, days=90)
    replay = replayed(engine, letter)
    change(
        engine,
        "UPDATE jobs SET prompt_ids = '{5}', max_tokens = 8, prepared_at = now() WHERE id = :id",
        id=replay,
    )
    end(engine, success(claim(engine, [replay])[0]))
    age(engine, replay, days=60)
    with engine.connect() as other, other.begin():
        other.execute(text("SELECT FROM jobs WHERE id = :id FOR UPDATE"), {"id": letter})
        assert clean(engine) == 0, "without its replay the letter would stay for ever"

    assert [clean(engine), clean(engine), clean(engine)] == [1, 1, 0]
    assert left(engine) == set()


def test_old_jobs_are_deleted_in_batches_oldest_first(engine: Engine) -> None:
    old = [ended(engine, days=days) for days in (35, 34, 33, 32, 31)]

    assert clean(engine, max_batch=2) == 2
    assert left(engine) == set(old[2:])
    assert [clean(engine, max_batch=2) for _ in range(3)] == [2, 1, 0]


def test_a_locked_row_does_not_hold_up_the_deletion_of_others(engine: Engine) -> None:
    locked = ended(engine, days=40)
    free = ended(engine, days=31)
    with engine.connect() as other, other.begin():
        other.execute(text("SELECT FROM jobs WHERE id = :id FOR UPDATE"), {"id": locked})
        assert clean(engine) == 1
    assert free not in left(engine)
    assert clean(engine) == 1


def test_a_second_relay_leaves_deletion_to_the_first(engine: Engine) -> None:
    ended(engine, days=31)
    with engine.connect() as first, first.begin():
        assert delete_old(first, age_s=30 * DAY_S).num_deleted == 1
        assert clean(engine) == 0


def test_retention_counts_its_batches_and_goes_on_until_none_is_left(engine: Engine) -> None:
    registry = CollectorRegistry()
    context = LoopContext(database=engine, times=Times(), metrics=RelayMetrics(registry))
    loop = Retention(context, days=30, is_default=False)
    many(engine, retention.MAX_BATCH + 1, "'expired', now() - interval '31 days'")
    ended(engine, days=29)

    assert [loop.turn(), loop.turn()] == [0.0, 60.0]

    assert registry.get_sample_value("shardline_relay_deleted_total") == retention.MAX_BATCH + 1
    assert len(left(engine)) == 1


@pytest.mark.parametrize(("days", "num_left"), [(7.0, 1), (0.0, 2)])
def test_old_acts_leave_the_audit_log_unless_the_setting_is_0(
    engine: Engine, days: float, num_left: int
) -> None:
    change(engine, "INSERT INTO pauses (kind, target) VALUES ('tenant', 'old'), ('tenant', 'new')")
    change(engine, "UPDATE audit SET at = now() - interval '8 days' WHERE object_id LIKE '%old'")
    context = LoopContext(database=engine, times=Times(), metrics=RelayMetrics(CollectorRegistry()))
    Retention(context, days=0, is_default=False, audit_days=days).turn()
    assert cell(engine, "SELECT count(*) FROM audit WHERE object_kind = 'pause'") == num_left


def retention_loop(engine: Engine, *, days: float, is_default: bool = False) -> Retention:
    context = LoopContext(database=engine, times=Times(), metrics=RelayMetrics(CollectorRegistry()))
    return Retention(context, days=days, is_default=is_default)


def test_nothing_is_deleted_where_the_setting_is_0(engine: Engine) -> None:
    ended(engine, days=9999)
    assert retention_loop(engine, days=0).turn() == 60.0
    assert len(left(engine)) == 1


def test_by_default_a_week_of_warnings_comes_before_the_first_deletion(engine: Engine) -> None:
    loop = retention_loop(engine, days=30, is_default=True)
    old = ended(engine, days=400)
    with capture_logs() as said:
        loop.turn()
    assert left(engine) == {old}
    assert [(line["older_than_days"], line["begins_in_days"]) for line in said] == [(30, 7.0)]
    change(engine, "UPDATE notices SET made_at = made_at - interval '8 days'")
    # Another relay, which has only just started.
    retention_loop(engine, days=30, is_default=True).turn()
    assert left(engine) == set()


def test_nothing_is_announced_before_something_could_be_deleted(engine: Engine) -> None:
    ended(engine, days=29)
    dead(engine, days=400)
    with capture_logs() as said:
        retention_loop(engine, days=30, is_default=True).turn()
    assert said == []
    assert cell(engine, "SELECT count(*) FROM notices") == 0


def test_rows_of_processes_that_are_long_gone_are_deleted(engine: Engine) -> None:
    with engine.begin() as connection:
        for name, days in (("gone", 31), ("known", 31), ("away", 29)):
            lease_s = -days * DAY_S
            fleets.join(
                connection, name, {"m": WorkerOffer(shapes={}, profile={})}, lease_s=lease_s
            )
            pipelines.take_epoch(
                connection, name, model="m", fingerprint="f", head="h", lease_s=lease_s
            )
    change(
        engine,
        "INSERT INTO energy_rates SELECT 'price', now() - make_interval(hours => n), n "
        "FROM generate_series(1, 100) AS n",
    )
    (job,) = submit(engine)
    change(
        engine, "UPDATE jobs SET created_at = now() - interval '10 h 1 min' WHERE id = :id", id=job
    )
    change(
        engine,
        "INSERT INTO pipeline_energy "
        "SELECT name, 1, 'table', 1, 1, now() - make_interval(hours => n) "
        "FROM (VALUES ('gone', 11), ('known', 10)) AS epochs(name, n)",
    )

    retention_loop(engine, days=0).turn()

    assert cell(engine, "SELECT array_agg(worker) FROM workers") == ["away"]
    left = "SELECT array_agg(id ORDER BY id) FROM pipelines WHERE id IN ('gone', 'away', 'known')"
    assert cell(engine, left) == ["away", "known"], "the oldest job may have run there"
    assert cell(engine, "SELECT array_agg(pipeline) FROM pipeline_energy") == ["known"]
    assert cell(engine, "SELECT max(per_kwh) FROM energy_rates") == 11, (
        "the rate under which the oldest job came"
    )


def test_the_setting_deletes_old_jobs(
    database_url: str, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDLINE_RETENTION_DAYS", "30")
    with relay_stack(database_url, redis_url, tmp_path) as here:
        old = ended(here.engine, days=31)
        young = ended(here.engine, days=29)
        here.start_relay(wait=False)
        until(lambda: old not in left(here.engine))
        assert left(here.engine) == {young}


def test_looking_for_old_jobs_reads_no_young_ones(engine: Engine) -> None:
    change(
        engine,
        "INSERT INTO jobs (model, prompt, state, finished_at) "
        "SELECT 'm', 'text', 'succeeded', now() FROM generate_series(1, 5000)",
    )
    ended(engine, days=31)
    change(engine, "ANALYZE jobs")
    with engine.begin() as connection:
        values = {
            "age_s": 30 * DAY_S,
            "after_at": retention.BEGINNING[0],
            "after_id": retention.BEGINNING[1],
        }
        plan = "\n".join(connection.scalars(text(f"EXPLAIN {retention.NEXT.text}"), values))
    assert "Index Only Scan using jobs_listing" in plan, plan


def test_old_jobs_of_megabytes_are_all_deleted_a_few_at_a_time(engine: Engine) -> None:
    """Seven of 6 MB, wherever their bytes are: a batch begins a row while it has 16 or less before
    it."""
    old = [ended(engine, days=40) for _ in range(7)]
    ids = "SELECT array_agg((random() * 1e9)::int) FROM generate_series(1, 1500000)"
    letters = "SELECT string_agg(md5(random()::text), '') FROM generate_series(1, 190000)"
    for table, column, key, value, some in (
        ("jobs", "prompt", "id", letters, old[:3]),
        ("results", "text", "job_id", letters, old[3:5]),
        ("attempts", "tokens", "job_id", ids, old[5:]),
    ):
        change(
            engine,
            f"UPDATE {table} SET {column} = made FROM ({value}) AS one(made) "
            f"WHERE {key} = ANY(:ids)",
            ids=some,
        )

    after = None
    deleted = []
    for _ in range(4):
        with engine.begin() as connection:
            batch = delete_old(connection, age_s=30 * DAY_S, after=after)
        after = batch.after
        deleted.append(batch.num_deleted)

    assert deleted == [3, 3, 1, 0]
    assert left(engine) == set()


def test_retention_gets_behind_many_rows_that_stay(engine: Engine) -> None:
    many(engine, retention.MAX_READ, "'queued', NULL")
    kept = left(engine)
    old = ended(engine, days=31)
    loop = retention_loop(engine, days=30)

    assert loop.turn() == 0.0
    assert left(engine) == {*kept, old}, "one batch does not read so far"
    assert loop.turn() == 60.0
    assert left(engine) == kept
