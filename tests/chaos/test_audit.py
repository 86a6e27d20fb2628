"""The judge's triggers and its look at the streams: who writes without holding the job is seen, who
holds it is not."""

from __future__ import annotations

import json
from uuid import UUID, uuid4

import psycopg
import pytest
import redis

from shardline.contract import keys
from tests.chaos.judge import audit
from tests.chaos.judge.emissions import stale_deltas

HOLDER = "shardline w"
OTHER = "shardline other"
RELAY = "shardline-relay"
JOB = """
INSERT INTO jobs (id, model, prompt, prompt_ids, max_tokens, prepared_at, state, fence, worker,
    lease_until)
VALUES (%s, 'clerk', 'p', '{1}', 4, now(), 'running', 2, 'w', now() + interval '1 h')
"""
ATTEMPT = """
INSERT INTO attempts (job_id, fence, pipeline, epoch, worker, fingerprint, exactness, num_resumed,
    tokens, started_at, heartbeat_at)
VALUES (%(job)s, %(fence)s, 'p', 1, 'w', 'f', 'e', 0,
    '{7}', to_timestamp(%(at)s), to_timestamp(%(at)s))
"""
LEASE = "UPDATE jobs SET lease_until = now() + make_interval(secs => %s) WHERE id = %s"
BEAT = "UPDATE jobs SET lease_until = now() + interval '2 s' WHERE id = %s"
END = "UPDATE jobs SET state = 'failed', finished_at = now(), lease_until = NULL WHERE id = %s"
REQUEUE = "UPDATE jobs SET state = 'queued', lease_until = NULL WHERE id = %s"
CUT_SHORT = "UPDATE jobs SET lease_until = now() WHERE id = %s"
CANCEL = "UPDATE jobs SET cancel_requested_at = now() WHERE id = %s"
SAVE = "UPDATE attempts SET tokens = '{7, 8}' WHERE job_id = %s AND fence = 2"
LEASE_S = 2.0


@pytest.fixture
def job_id(database_url: str) -> UUID:
    """Running under fence 2 in the worker `w`, and watched."""
    job_id = uuid4()
    audit.install(database_url, lease_s=LEASE_S)
    with psycopg.connect(database_url) as connection:
        connection.execute(JOB, (job_id,))
        for fence, started_s in ((1, 100.0), (2, 200.0)):
            connection.execute(ATTEMPT, {"job": job_id, "fence": fence, "at": started_s})
    return job_id


def write(database_url: str, name: str, change: str, job_id: UUID) -> None:
    with psycopg.connect(database_url, application_name=name) as connection:
        connection.execute(change, (job_id,))


@pytest.mark.parametrize("change", [BEAT, CUT_SHORT, END, REQUEUE, SAVE])
def test_writes_of_the_holder_are_no_finding(database_url: str, job_id: UUID, change: str) -> None:
    write(database_url, HOLDER, change, job_id)
    assert audit.stale_writes(database_url) == []


@pytest.mark.parametrize("change", [BEAT, END, REQUEUE, SAVE])
def test_a_write_of_another_head_is_found(database_url: str, job_id: UUID, change: str) -> None:
    write(database_url, OTHER, change, job_id)
    (finding,) = audit.stale_writes(database_url)
    assert (finding.invariant, finding.count, finding.job_id) == ("I3", "stale_commits", job_id)
    assert OTHER in finding.what


def test_a_lease_taken_by_a_relay_before_its_end_is_found(database_url: str, job_id: UUID) -> None:
    write(database_url, HOLDER, CUT_SHORT, job_id)
    write(database_url, RELAY, REQUEUE, job_id)
    assert audit.stale_writes(database_url) == []
    early = uuid4()
    write(database_url, HOLDER, JOB, early)
    write(database_url, RELAY, REQUEUE, early)
    assert [finding.job_id for finding in audit.stale_writes(database_url)] == [early]


@pytest.mark.parametrize("shift_s", [3600, -3600])
def test_a_lease_taken_by_a_wrong_clock_is_found(
    database_url: str, job_id: UUID, shift_s: int
) -> None:
    with psycopg.connect(database_url, application_name=HOLDER) as connection:
        connection.execute(LEASE, (LEASE_S + shift_s, job_id))
    assert [finding.job_id for finding in audit.stale_writes(database_url)] == [job_id]


def test_a_cancel_request_for_a_running_job_is_no_finding(database_url: str, job_id: UUID) -> None:
    write(database_url, "gateway", CANCEL, job_id)
    assert audit.stale_writes(database_url) == []


@pytest.mark.parametrize(
    ("times_s", "is_found"),
    [
        pytest.param((150, 199), False, id="before the next claim"),
        pytest.param((203, 203.1), False, id="late, at once"),
        pytest.param((201, 203, 204), True, id="for longer than a lease"),
    ],
)
def test_deltas_of_an_older_fence_after_the_next_claim_are_found(
    database_url: str, redis_url: str, job_id: UUID, times_s: tuple[float, ...], is_found: bool
) -> None:
    with redis.Redis.from_url(redis_url) as client:
        for at_s in times_s:
            delta = json.dumps({"fence": 1, "start": 0, "ids": [1]})
            client.xadd(keys.job_stream(job_id), {"d": delta}, id=f"{int(at_s * 1000)}-0")
    found = stale_deltas(database_url, redis_url, [job_id], lease_s=LEASE_S)
    assert [finding.count for finding in found] == (["stale_deltas"] if is_found else [])
