"""The relay when servers and relays die, freeze or come back empty: nothing accepted is lost,
nothing is twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest

from services.standalone.servers import Postgres, Valkey
from shardline.contract.job import JobState
from shardline.contract.keys import INTAKE, INTAKE_GROUP, OUTBOX_MARK
from shardline.store import jobs
from shardline_server.store.leases import Beat, heartbeat
from tests.integration.relay.relay_stack import RelayStack, relay_stack
from tests.integration.rows import LONG_S, MODEL, cell, change, claim_one, pass_time, request
from tests.polling import until

NUM_JOBS = 40


@pytest.fixture
def here(database_url: str, redis_url: str, tmp_path: Path) -> Iterator[RelayStack]:
    """Servers without a relay: tests start theirs."""
    with relay_stack(database_url, redis_url, tmp_path) as here:
        yield here


def insert(here: RelayStack, num: int = NUM_JOBS) -> set[str]:
    """Jobs that a relay must prepare and send."""
    with here.engine.begin() as connection:
        return {
            str(one.job_id) for one in jobs.insert_jobs(connection, [request(prompt="one")] * num)
        }


def all_sent(here: RelayStack, ids: set[str]) -> bool:
    """Whether every row has been stamped."""
    return bool(
        cell(here.engine, "SELECT count(*) FROM jobs WHERE sent_at IS NOT NULL") == len(ids)
    )


def test_the_window_is_sent_again_at_once_after_redis_lost_everything(
    here: RelayStack, redis_server: Valkey
) -> None:
    here.start_relay()
    ids = insert(here)
    until(lambda: all_sent(here, ids))
    change(here.engine, "UPDATE jobs SET sent_at = now() + interval '1 hour'")
    redis_server.kill()
    redis_server.restart()
    assert set(here.take_messages(NUM_JOBS)) == ids


def test_the_window_is_sent_again_after_a_flush_of_redis(here: RelayStack) -> None:
    here.start_relay()
    ids = insert(here)
    until(lambda: all_sent(here, ids) and here.redis.exists(OUTBOX_MARK))
    here.redis.flushall()
    assert set(here.take_messages(NUM_JOBS)) == ids


def test_jobs_accepted_without_redis_are_sent_once_it_is_back(
    here: RelayStack, redis_server: Valkey
) -> None:
    relay = here.start_relay()
    redis_server.kill()
    ids = insert(here)
    until(
        lambda: (
            cell(here.engine, "SELECT count(*) FROM jobs WHERE prepared_at IS NOT NULL") == NUM_JOBS
        )
    )
    redis_server.restart()
    assert set(here.take_messages(NUM_JOBS)) == ids
    assert relay.process.poll() is None


def test_sweeps_and_preparation_go_on_while_redis_is_frozen(
    here: RelayStack, redis_server: Valkey
) -> None:
    relay = here.start_relay()
    redis_server.pause()
    ids = insert(here)
    until(
        lambda: (
            cell(here.engine, "SELECT count(*) FROM jobs WHERE prepared_at IS NOT NULL") == NUM_JOBS
        )
    )
    change(
        here.engine, "UPDATE jobs SET deadline_at = now() WHERE id = (SELECT id FROM jobs LIMIT 1)"
    )
    until(lambda: cell(here.engine, "SELECT count(*) FROM jobs WHERE state = 'expired'") == 1)
    redis_server.resume()
    assert set(here.take_messages(NUM_JOBS - 1)) < ids
    assert relay.process.poll() is None


def test_a_relay_goes_on_once_a_full_redis_has_room(here: RelayStack) -> None:
    relay = here.start_relay()
    here.redis.config_set("maxmemory", 1)
    here.redis.client_kill_filter(_type="normal")
    until(lambda: b"Connection to broker lost" in relay.log.read_bytes())
    until(lambda: relay.log.read_bytes().count(b"maxmemory") > 1)
    here.redis.config_set("maxmemory", 0)
    ids = insert(here)
    assert set(here.take_messages(NUM_JOBS)) == ids
    assert relay.process.poll() is None


def test_a_relay_stores_the_request_it_holds_though_redis_dies(
    here: RelayStack, redis_server: Valkey, postgres_server: Postgres
) -> None:
    relay = here.start_relay()
    postgres_server.kill()
    try:
        task_id = here.submit({"model": MODEL, "prompt": "one"})
        until(lambda: task_id in here.active_tasks())
        redis_server.restart()
        until(lambda: relay.log.read_bytes().count(b"Connected to redis") > 1)
    finally:
        postgres_server.start()
        here.engine.dispose()
    assert here.take_messages(1) == [task_id]
    assert relay.process.poll() is None


def test_requests_wait_for_postgres_and_become_rows(
    here: RelayStack, postgres_server: Postgres
) -> None:
    relay = here.start_relay()
    postgres_server.kill()
    try:
        task_ids = {here.submit({"model": MODEL, "prompt": "one"}) for _ in range(6)}
        for _ in range(6):
            here.redis.xadd(INTAKE, {"request": json.dumps({"model": MODEL, "prompt": "two"})})
        until(lambda: b"postgres unreachable" in relay.log.read_bytes())
    finally:
        postgres_server.start()
    here.engine.dispose()
    assert task_ids < set(here.take_messages(12))
    assert cell(here.engine, "SELECT count(*) FROM jobs") == 12
    until(lambda: here.redis.xlen(INTAKE) == 0)


def test_entries_taken_by_a_dead_relay_are_taken_over_once(here: RelayStack) -> None:
    here.redis.xgroup_create(INTAKE, INTAKE_GROUP, id="0", mkstream=True)
    for number in range(NUM_JOBS):
        here.redis.xadd(
            INTAKE,
            {"request": json.dumps({"model": MODEL, "prompt": "one", "metadata": {"n": number}})},
        )
    here.redis.xreadgroup(INTAKE_GROUP, "dead", {INTAKE: ">"}, count=NUM_JOBS)
    here.start_relay()
    here.start_relay()
    assert len(set(here.take_messages(NUM_JOBS))) == NUM_JOBS
    until(lambda: here.redis.xlen(INTAKE) == 0)
    assert cell(here.engine, "SELECT count(DISTINCT metadata) FROM jobs") == NUM_JOBS
    assert cell(here.engine, "SELECT count(*) FROM jobs") == NUM_JOBS


def test_an_entry_committed_but_not_acknowledged_becomes_one_row(here: RelayStack) -> None:
    here.redis.xgroup_create(INTAKE, INTAKE_GROUP, id="0", mkstream=True)
    document = json.dumps({"model": MODEL, "prompt": "one"})
    here.redis.xadd(INTAKE, {"request": document}, id="1-1")
    here.start_relay()
    here.take_messages(1)
    until(lambda: here.redis.xlen(INTAKE) == 0)
    # A stream made anew takes the old id: to the relay it is the same entry, delivered once more.
    here.redis.delete(INTAKE)
    here.redis.xadd(INTAKE, {"request": document}, id="1-1")
    until(lambda: here.redis.xlen(INTAKE) == 0)
    assert cell(here.engine, "SELECT count(*) FROM jobs") == 1


def test_each_request_becomes_one_row_while_relays_are_killed(here: RelayStack) -> None:
    num_rounds = 3
    for turn in range(num_rounds):
        relay = here.start_relay()
        for number in range(NUM_JOBS):
            document = {
                "model": MODEL,
                "prompt": "one",
                "metadata": {"n": turn * NUM_JOBS + number},
            }
            here.redis.xadd(INTAKE, {"request": json.dumps(document)})
        relay.kill()
    here.start_relay()
    expected = num_rounds * NUM_JOBS
    until(
        lambda: (
            cell(here.engine, "SELECT count(*) FROM jobs WHERE prepared_at IS NOT NULL") == expected
        )
    )
    assert cell(here.engine, "SELECT count(DISTINCT metadata) FROM jobs") == expected


def test_two_relays_with_a_backlog_send_every_job_and_it_is_claimed_once(here: RelayStack) -> None:
    here.start_relay()
    here.start_relay()
    ids = insert(here, 300)
    claimed: set[str] = set()
    while len(claimed) < 300:
        for job_id in here.take_messages(min(20, 300 - len(claimed))):
            if here.claim(job_id):
                claimed.add(job_id)
    assert claimed == ids


def test_a_job_whose_lease_expired_is_requeued_and_sent_again(here: RelayStack) -> None:
    here.start_relay()
    (job_id,) = insert(here, 1)
    here.take_messages(1)
    claimed = claim_one(here.engine, UUID(job_id))
    with here.engine.begin() as connection:
        beat = Beat(job_id=claimed.job_id, fence=claimed.fence, start=0, ids=(2, 3))
        heartbeat(connection, [beat], lease_s=LONG_S)
        pass_time(connection, claimed.job_id, "lease_until")
    assert here.take_messages(1) == [str(claimed.job_id)]
    again = claim_one(here.engine, claimed.job_id)
    assert (again.output_ids, again.crashes) == ((2, 3), 0)
    with here.engine.begin() as connection:
        jobs.request_cancel(connection, [again.job_id])
        pass_time(connection, again.job_id, "lease_until")
    job = here.wait_for_end(again.job_id)
    assert job.state is JobState.CANCELLED
    assert job.result is not None
    assert job.result.text == " one two", "it goes on behind the prompt"


def test_a_stopped_relay_ends_promptly_and_cleanly(here: RelayStack) -> None:
    relay = here.start_relay()
    insert(here)
    assert relay.stop() == 0
    assert b"Traceback" not in relay.log.read_bytes()


def test_a_stopped_relay_ends_though_its_servers_are_away(
    here: RelayStack, redis_server: Valkey, postgres_server: Postgres
) -> None:
    relay = here.start_relay()
    here.submit({"model": MODEL, "prompt": "one"})
    here.take_messages(1)
    postgres_server.kill()
    try:
        here.submit({"model": MODEL, "prompt": "two"})
        until(lambda: b"postgres unreachable" in relay.log.read_bytes())
        redis_server.kill()
        assert relay.stop() == 0
    finally:
        postgres_server.start()
        redis_server.restart()
        here.engine.dispose()
