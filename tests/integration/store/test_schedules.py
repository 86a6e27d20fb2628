"""Schedules on a real Postgres: each time has one job, whoever looks, whoever dies and whatever the
clock does; and what is wrong with one is its own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from itertools import chain, pairwise
from threading import Barrier
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import Connection, Engine, text

from services.relay.loop import LoopContext
from services.relay.schedule_keeper import ScheduleKeeper
from shardline.base.config import Times
from shardline.base.errors import Conflict, Invalid, NotFound
from shardline.contract.schedules.cron import next_time
from shardline.contract.schedules.schedule_tables import CatchUp, PauseKind
from shardline.store import api_keys
from shardline.store.api_keys import Grant
from shardline.store.schedules import pauses, schedule_rows
from shardline.store.schedules.schedule_rows import NewSchedule, Schedule
from shardline.store.tenants import quotas
from shardline_server.metrics import RelayMetrics
from shardline_server.store import due_schedules
from shardline_server.store.due_schedules import Firing
from tests.integration.rows import MODEL, cell, change, database_with_head

NUM_JOBS = "SELECT count(*) FROM jobs"
EACH_MINUTE = "* * * * *"
MISSED = "UPDATE schedules SET next_at = date_trunc('minute', now()) - make_interval(mins => :mins)"
NUM_SCHEDULES = 40
NUM_RELAYS = 4


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    with database_with_head(database_url) as engine:
        yield engine


def make(engine: Engine, **fields: Any) -> Schedule:
    values = {"name": "nightly", "cron": EACH_MINUTE, "request": {"model": MODEL, "prompt": "a"}}
    with engine.begin() as connection:
        return schedule_rows.create(connection, NewSchedule(**{**values, **fields}))


def get(engine: Engine, made: Schedule) -> Schedule:
    with engine.begin() as connection:
        return schedule_rows.get(connection, made.id, tenant=made.tenant)


def fire(engine: Engine) -> list[Firing]:
    """What a relay does until nothing is due."""
    found: list[Firing] = []
    while True:
        with engine.begin() as connection:
            fired = due_schedules.fire_next(connection)
        if fired is None:
            return found
        found.append(fired)


def outcomes(engine: Engine) -> list[str]:
    return [one.outcome for one in fire(engine)]


def test_a_time_that_comes_is_one_job_with_the_name_of_its_schedule(engine: Engine) -> None:
    made = make(engine, request={"model": MODEL, "prompt": "a", "metadata": {"a": 1}}, key_name="k")
    assert made.next_at is not None
    assert made.next_at > made.created_at
    assert outcomes(engine) == []
    change(engine, MISSED, mins=0)
    assert outcomes(engine) == ["fired"]
    assert outcomes(engine) == []
    after = get(engine, made)
    query = "SELECT id, tenant_id, model, prompt, metadata, key_name FROM jobs"
    with engine.begin() as connection:
        (job,) = connection.execute(text(query)).all()
    assert job[0] == after.last_job_id
    assert job[1:] == ("default", MODEL, "a", {"a": 1, "schedule": "nightly"}, "k")
    assert after.next_at is not None
    assert after.last_at is not None
    assert after.next_at > after.last_at
    with engine.begin() as connection:
        pauses.pause(connection, PauseKind.TAG, "schedule=nightly")
    held = f"SELECT {pauses.PAUSED_BY} FROM jobs"
    assert cell(engine, held.replace(":", "\\:")) == "tag schedule=nightly"


def test_of_several_relays_one_fires(engine: Engine) -> None:
    for number in range(NUM_SCHEDULES):
        make(engine, name=f"number {number}")
    change(engine, MISSED, mins=0)
    together = Barrier(NUM_RELAYS)

    def relay() -> list[str]:
        together.wait()
        return outcomes(engine)

    with ThreadPoolExecutor(NUM_RELAYS) as pool:
        found = [future.result() for future in [pool.submit(relay) for _ in range(NUM_RELAYS)]]
    assert [*chain.from_iterable(found)] == ["fired"] * NUM_SCHEDULES
    assert cell(engine, NUM_JOBS) == NUM_SCHEDULES
    assert cell(engine, "SELECT count(DISTINCT metadata ->> 'schedule') FROM jobs") == NUM_SCHEDULES


def test_a_relay_that_dies_before_it_commits_has_fired_nothing_and_the_next_one_does(
    engine: Engine,
) -> None:
    make(engine)
    change(engine, MISSED, mins=0)
    with engine.connect() as dying:
        first = due_schedules.fire_next(dying)
        assert first is not None
        assert outcomes(engine) == [], "its row is passed over while it lives"
        kill(engine, dying)
    assert cell(engine, NUM_JOBS) == 0
    assert outcomes(engine) == ["fired"]
    assert cell(engine, NUM_JOBS) == 1


def kill(engine: Engine, victim: Connection) -> None:
    """As the server sees the end of a process that was killed."""
    pid = victim.execute(text("SELECT pg_backend_pid()")).scalar_one()
    change(engine, "SELECT pg_terminate_backend(:pid)", pid=pid)
    gone = "SELECT count(*) FROM pg_stat_activity WHERE pid = :pid"
    while cell(engine, gone, pid=pid):
        pass
    victim.invalidate()


@pytest.mark.parametrize(
    ("catch_up", "mins", "fired", "num_jobs"),
    [("once", 90, ["fired"], 1), ("none", 90, ["missed"], 0), ("none", 0, ["fired"], 1)],
)
def test_what_was_missed_is_one_job_or_none(
    engine: Engine, catch_up: str, mins: int, fired: list[str], num_jobs: int
) -> None:
    made = make(engine, catch_up=CatchUp(catch_up))
    change(engine, MISSED, mins=mins)
    now = cell(engine, "SELECT now()")
    # A time that is not older than a minute is due, not missed.
    change(engine, "UPDATE schedules SET next_at = now() WHERE :mins = 0", mins=mins)
    assert outcomes(engine) == fired
    assert cell(engine, NUM_JOBS) == num_jobs
    after = get(engine, made)
    assert after.next_at is not None
    assert after.next_at > now
    assert (after.last_error or {}).get("code") == (None if num_jobs else "missed")


def test_a_clock_that_is_put_back_fires_no_time_twice(engine: Engine) -> None:
    made = make(engine)
    change(engine, MISSED, mins=0)
    fired_at = cell(engine, "SELECT next_at FROM schedules")
    assert outcomes(engine) == ["fired"]
    # Then somebody begins the schedule anew: that time is to come once more.
    change(engine, "UPDATE schedules SET next_at = :at", at=fired_at)
    assert outcomes(engine) == ["fired"]
    assert cell(engine, NUM_JOBS) == 1
    assert get(engine, made).last_error is None


def test_a_quota_that_refuses_is_told_of_and_the_next_time_is_tried(engine: Engine) -> None:
    with engine.begin() as connection:
        quotas.set_quota(connection, "acme", {"max_queued": 0})
    made = make(engine, tenant="acme")
    change(engine, MISSED, mins=0)
    assert outcomes(engine) == ["refused"]
    after = get(engine, made)
    assert after.last_error is not None
    assert after.last_error["code"] == "limit_exceeded"
    assert (after.paused, cell(engine, NUM_JOBS)) == (False, 0)
    with engine.begin() as connection:
        quotas.set_quota(connection, "acme", {"max_queued": 5})
    change(engine, MISSED, mins=0)
    assert outcomes(engine) == ["fired"]
    assert get(engine, made).last_error is None


def test_a_schedule_whose_tenant_is_locked_stays_due_and_the_others_fire(engine: Engine) -> None:
    with engine.begin() as connection:
        quotas.set_quota(connection, "acme", {"max_queued": 5})
    for name in ("first", "second"):
        make(engine, name=name, tenant="acme")
    change(engine, MISSED, mins=1)
    make(engine, name="other")
    change(engine, f"{MISSED} WHERE name = 'other'", mins=0)
    context = LoopContext(database=engine, times=Times(), metrics=RelayMetrics(CollectorRegistry()))
    keeper = ScheduleKeeper(context)
    name = "metadata ->> 'schedule'"
    fired = f"SELECT array_agg({name} ORDER BY {name}) FROM jobs"
    with engine.begin() as holder:
        holder.execute(text("SELECT FROM quotas FOR UPDATE"))
        holder.execute(text("SELECT FROM quota_use FOR UPDATE"))
        assert keeper.turn() == context.times.poll_s
        assert cell(engine, fired) == ["other"]
    keeper.turn()
    assert cell(engine, fired) == ["first", "other", "second"]


def test_a_schedule_ends_with_the_last_key_of_the_name_that_made_it(engine: Engine) -> None:
    with engine.begin() as connection:
        api_keys.create(connection, Grant(name="web", tenant="acme"))
        api_keys.create(connection, Grant(name="other", tenant="default"))
        api_keys.revoke(connection, "other")
    made = make(engine, tenant="acme", key_name="web")
    make(engine, name="other", tenant="acme", key_name="other")
    with engine.begin() as connection:
        api_keys.rotate(connection, "web", grace_s=60.0)
        (old,) = connection.scalars(text("SELECT id FROM api_keys WHERE replaced_at IS NOT NULL"))
        api_keys.revoke(connection, old)
    change(engine, MISSED, mins=0)
    assert outcomes(engine) == ["fired", "fired"]
    with engine.begin() as connection:
        api_keys.revoke(connection, "web")
    change(engine, MISSED, mins=0)
    assert sorted(outcomes(engine)) == ["fired", "invalid"]
    after = get(engine, made)
    assert after.last_error is not None
    assert (after.paused, after.last_error["field"]) == (True, "key_name")
    assert "'web', which made the schedule, was revoked" in after.last_error["problem"]


def test_a_paused_schedule_fires_nothing_and_catches_nothing_up(engine: Engine) -> None:
    made = make(engine)
    change(engine, MISSED, mins=90)
    for paused in (True, False):
        with engine.begin() as connection:
            schedule_rows.set_paused(connection, made.id, paused=paused, tenant=None)
        assert outcomes(engine) == ([] if paused else ["found"])
    after = get(engine, made)
    assert after.next_at is not None
    assert after.next_at > cell(engine, "SELECT now()")
    assert cell(engine, NUM_JOBS) == 0


def test_rows_of_sql_are_schedules_and_what_they_missed_is_caught_up(engine: Engine) -> None:
    insert = """
    INSERT INTO schedules (name, cron, request, fires_after)
    VALUES ('by hand', '* * * * *', '{"model": "m", "prompt": "a"}', now() - interval '1 hour')
    """
    change(engine, insert)
    assert outcomes(engine) == ["found", "fired"]
    change(engine, "UPDATE schedules SET cron = '0 7 * * *', time_zone = 'Asia/Kathmandu'")
    assert outcomes(engine) == ["found"]
    local = "SELECT to_char(next_at AT TIME ZONE 'Asia/Kathmandu', 'HH24:MI') FROM schedules"
    assert cell(engine, local) == "07:00"


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("cron", "never"),
        ("cron", "0 0 * 13 *"),
        ("time_zone", "Mars/Olympus"),
        ("request", "{}"),
        ("request", '{"model": "m", "prompt": "a", "top_p": 7}'),
        ("request", '{"model": "m", "prompt": "\\u0000"}'),
        ("request", '{"model": "m", "prompt": "a", "id": "x"}'),
        ("request", '{"metadata": ' + "[" * 3_000 + "]" * 3_000 + "}"),
    ],
)
def test_a_row_that_is_wrong_is_paused_with_its_reason_and_blocks_no_other(
    engine: Engine, column: str, value: str
) -> None:
    wrong = make(engine, name="wrong")
    change(engine, f"UPDATE schedules SET {column} = :value", value=value)
    change(engine, "UPDATE schedules SET next_at = now() - interval '1 hour'")
    make(engine, name="right")
    change(engine, "UPDATE schedules SET next_at = now() WHERE name = 'right'")
    assert outcomes(engine) == ["invalid", "fired"]
    with engine.begin() as connection:
        found, _ = schedule_rows.list_schedules(connection, tenant=None, limit=10)
    after = {one.name: one for one in found}
    assert after["wrong"].paused
    assert after["wrong"].last_error is not None
    assert after["wrong"].last_error["problem"]
    assert not after["right"].paused
    assert wrong.id == after["wrong"].id


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("cron", {"cron": "* * * *"}),
        ("cron", {"cron": "0 0 30 2 *"}),
        ("cron", {"cron": "0 0 0 0 0 0"}),
        ("time_zone", {"time_zone": "../etc"}),
        ("name", {"name": ""}),
        ("request.top_p", {"request": {"model": MODEL, "prompt": "a", "top_p": 7}}),
        ("request.id", {"request": {"model": MODEL, "prompt": "a", "id": "x"}}),
        ("request.tenant", {"request": {"model": MODEL, "prompt": "a", "tenant": "b"}}),
        ("request.prompt", {"request": {"model": MODEL, "prompt": "\0"}}),
        ("request", {"request": {"model": MODEL, "prompt": "a" * (256 << 10)}}),
    ],
)
def test_a_schedule_is_checked_as_it_is_made(
    engine: Engine, field: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(Invalid) as raised:
        make(engine, **fields)
    assert raised.value.field == field
    assert cell(engine, "SELECT count(*) FROM schedules") == 0


def test_names_are_the_tenants_own_and_lists_have_pages(engine: Engine) -> None:
    made = [make(engine, name=f"n{number}") for number in range(5)]
    other = make(engine, name="n0", tenant="other")
    with pytest.raises(Conflict):
        make(engine, name="n0")
    with engine.begin() as connection:
        first, has_more = schedule_rows.list_schedules(connection, tenant="default", limit=3)
        assert has_more
        rest, has_more = schedule_rows.list_schedules(
            connection, tenant="default", limit=3, after=first[-1].id
        )
        assert not has_more
        assert [one.id for one in first + rest] == [one.id for one in reversed(made)]
        with pytest.raises(Invalid):
            schedule_rows.list_schedules(connection, tenant="default", limit=3, after=other.id)
        with pytest.raises(NotFound):
            schedule_rows.delete(connection, other.id, tenant="default")
        schedule_rows.delete(connection, other.id, tenant="other")
        with pytest.raises(NotFound):
            schedule_rows.get(connection, other.id, tenant=None)


BERLIN = "Europe/Berlin"


@pytest.mark.parametrize(
    ("cron", "after", "times"),
    [
        # Put forward on 2026-03-29 from 02:00 to 03:00.
        ("30 2 * * *", "03-28T12:00", ["03-29T01:00", "03-30T00:30"]),
        ("0 * * * *", "03-28T23:30", ["03-29T00:00", "03-29T01:00", "03-29T02:00"]),
        ("*/20 2-3 * * *", "03-28T12:00", ["03-29T01:00", "03-29T01:20", "03-29T01:40"]),
        # Put back on 2026-10-25 from 03:00 to 02:00.
        ("30 2 * * *", "10-24T12:00", ["10-25T00:30", "10-26T01:30"]),
        ("0 * * * *", "10-24T23:30", ["10-25T00:00", "10-25T01:00", "10-25T02:00"]),
        # Made between the two: the one that was is not to come.
        ("30 2 * * *", "10-25T01:10", ["10-26T01:30"]),
        ("0 3 * * *", "10-24T12:00", ["10-25T02:00", "10-26T02:00"]),
    ],
)
def test_times_when_clocks_are_put_forward_and_back(
    cron: str, after: str, times: list[str]
) -> None:
    moments = [datetime.fromisoformat(f"2026-{one}").replace(tzinfo=UTC) for one in (after, *times)]
    for before, wanted in pairwise(moments):
        assert next_time(cron, BERLIN, before) == wanted
