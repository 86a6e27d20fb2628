"""A head's ledger between a real Postgres, a real engine on a tiny model, and tickets that a test reads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, cast
from uuid import UUID

import pytest
import redis
from celery.exceptions import Ignore, Terminated
from sqlalchemy import Engine as Database
from sqlalchemy import text
from structlog.testing import capture_logs

from services.stage.engine import engine as engine_module
from services.stage.engine.engine import HeadEngine
from services.stage.engine.executor import Executor
from services.stage.jobs import claimer as claiming_module
from services.stage.jobs import heartbeater as heartbeater_module
from services.stage.scheduling.events import Crashed
from services.stage.scheduling.scheduler import Scheduler
from shardline.clock import lease_clock_s
from shardline.config import Times
from shardline.errors import JobFailed
from shardline.job import JobState
from shardline.keys import job_stream
from shardline.store import jobs
from tests.integration.rows import cell, change, database_with_head, num_blocked, request, state
from tests.integration.stage.jobs.desk import Desk, identity, open_desk, tiny_executor
from tests.polling import until
from tests.simulation.pipeline import Numbers
from tests.simulation.pipeline import config as scheduler_config
from tests.simulation.pipeline import request as engine_request

TIMES = Times().scaled(0.2)
LONG = 4_000
"""More tokens than a test lets a job reach."""


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    """A tiny model with a long context."""
    with tiny_executor(tmp_path_factory.mktemp("ledger")) as executor:
        yield executor


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    with database_with_head(database_url) as engine:
        yield engine


@pytest.fixture
def times() -> Times:
    """The protocol's; tests override it."""
    return TIMES


@pytest.fixture
def desk(database: Database, executor: Executor, redis_url: str, times: Times) -> Iterator[Desk]:
    """Ready to take jobs."""
    with open_desk(database, executor, redis_url, times) as desk:
        yield desk


def submit(database: Database, max_tokens: int, **fields: Any) -> UUID:
    """One prepared job that runs to its limit."""
    wanted = request(max_tokens=max_tokens, ignore_eos=True, seed=5, **fields)
    with database.begin() as connection:
        return jobs.insert_jobs(connection, [wanted], prepared=[((5, 6), max_tokens)])[0].job_id


def saved_tokens(database: Database, job_id: UUID) -> int:
    """Checkpointed tokens of the newest attempt."""
    return int(
        cell(database, "SELECT coalesce(max(cardinality(tokens)), 0) FROM attempts WHERE job_id = :id", id=job_id)
    )


def num_entries(client: redis.Redis, job_id: UUID) -> int:
    """Deltas that were ever written to a job's stream."""
    return int(cast(Any, client.xinfo_stream(job_stream(job_id)))["entries-added"])


def test_an_offered_job_is_claimed_run_committed_and_settled(desk: Desk) -> None:
    job_id = submit(desk.database, 12)

    desk.offer(job_id)

    assert desk.verdict() == (job_id, "started")
    assert desk.verdict() == (job_id, "succeeded")
    with desk.database.begin() as connection:
        job = jobs.get_job(connection, job_id)
    assert job is not None
    assert job.result is not None
    assert (job.state, len(job.result.token_ids), job.result.exact) == (JobState.SUCCEEDED, 12, True)
    assert job.result.provenance["pipeline"] == "p"


def test_a_committed_job_is_one_line_of_the_log(desk: Desk) -> None:
    with capture_logs() as told:
        job_id = submit(desk.database, 12)
        desk.offer(job_id)
        assert desk.verdict() == (job_id, "started")
        assert desk.verdict() == (job_id, "succeeded")

    (line,) = [one for one in told if one.get("job_id") == str(job_id)]
    assert (line["event"], line["log_level"], line["outcome"]) == ("job ended", "info", "succeeded")
    assert (line["model"], line["reason"], line["completion_tokens"]) == ("m", "length", 12)
    assert {"prompt_tokens", "queued_s", "running_s", "first_token_s"} <= line.keys()


def test_a_refused_statement_is_logged_and_nothing_is_lost_once_it_is_mended(desk: Desk) -> None:
    with capture_logs() as told:
        change(desk.database, "ALTER TABLE results RENAME TO hidden")
        job_id = submit(desk.database, 12)
        desk.offer(job_id)
        until(lambda: desk.ledger.stats()["database_away"])
        change(desk.database, "ALTER TABLE hidden RENAME TO results")
        assert desk.verdict() == (job_id, "started")
        assert desk.verdict() == (job_id, "succeeded")
        until(lambda: not desk.ledger.stats()["database_away"])
    (line,) = [one for one in told if one["event"].startswith(("Postgres", "postgres"))][:-1]
    assert (line["event"].partition(":")[0], line["log_level"]) == ("Postgres refuses a statement", "error")
    assert (line["sqlstate"], "results" in line["error"]) == ("42P01", True)
    assert told[-1]["event"] == "Postgres works again"


def test_a_second_delivery_of_a_running_job_is_dropped(desk: Desk) -> None:
    job_id = submit(desk.database, LONG)
    desk.offer(job_id)
    assert desk.verdict() == (job_id, "started")

    desk.offer(job_id)

    assert desk.verdict() == (job_id, Ignore.__name__)
    assert state(desk.database, job_id) is JobState.RUNNING
    assert desk.ledger.cancel([str(job_id)]) == 1
    assert desk.verdict() == (job_id, Terminated.__name__)
    assert state(desk.database, job_id) is JobState.CANCELLED


def test_a_cancel_read_by_the_heartbeat_keeps_the_partial_tokens(desk: Desk) -> None:
    job_id = submit(desk.database, LONG)
    desk.offer(job_id)
    assert desk.verdict() == (job_id, "started")
    until(lambda: saved_tokens(desk.database, job_id) > 0)

    change(desk.database, "UPDATE jobs SET cancel_requested_at = now() WHERE id = :id", id=job_id)

    assert desk.verdict() == (job_id, Terminated.__name__)
    assert cell(desk.database, "SELECT finish_reason FROM results WHERE job_id = :id", id=job_id) == "cancelled"
    assert cell(desk.database, "SELECT completion_tokens FROM results WHERE job_id = :id", id=job_id) > 0
    until(lambda: desk.executor.blocks_used == 0)


def test_a_job_past_its_deadline_expires_at_the_heartbeat(desk: Desk) -> None:
    job_id = submit(desk.database, LONG)
    desk.offer(job_id)
    assert desk.verdict() == (job_id, "started")

    change(desk.database, "UPDATE jobs SET deadline_at = now() WHERE id = :id", id=job_id)

    assert desk.verdict() == (job_id, Terminated.__name__)
    assert state(desk.database, job_id) is JobState.EXPIRED


def test_nothing_more_is_written_once_another_head_holds_the_fence(desk: Desk) -> None:
    job_id = submit(desk.database, LONG)
    desk.offer(job_id)
    assert desk.verdict() == (job_id, "started")

    change(desk.database, "UPDATE jobs SET fence = fence + 1, worker = 'other' WHERE id = :id", id=job_id)

    assert desk.verdict() == (job_id, Ignore.__name__)
    assert cell(desk.database, "SELECT worker FROM jobs WHERE id = :id", id=job_id) == "other"
    until(lambda: desk.executor.blocks_used == 0)


def test_a_released_job_ends_on_another_head_with_the_same_tokens(desk: Desk, redis_url: str) -> None:
    whole, interrupted = (submit(desk.database, 1_500, temperature=0.8) for _ in range(2))
    desk.offer(whole)
    assert [desk.verdict(), desk.verdict()] == [(whole, "started"), (whole, "succeeded")]
    desk.offer(interrupted)
    assert desk.verdict() == (interrupted, "started")
    until(lambda: saved_tokens(desk.database, interrupted) > 0)

    desk.ledger.give_back()

    assert desk.verdict() == (interrupted, Ignore.__name__)
    assert state(desk.database, interrupted) is JobState.QUEUED
    with open_desk(desk.database, desk.executor, redis_url, TIMES) as other:
        other.offer(interrupted)
        assert [other.verdict(), other.verdict()] == [(interrupted, "started"), (interrupted, "succeeded")]
    tokens = "SELECT token_ids FROM results WHERE job_id = :id"
    assert cell(desk.database, tokens, id=interrupted) == cell(desk.database, tokens, id=whole)
    assert cell(desk.database, "SELECT crashes FROM jobs WHERE id = :id", id=interrupted) == 0


@pytest.mark.parametrize("times", [TIMES.model_copy(update={"lease_s": 3_600.0})], ids=["lease of an hour"])
def test_tokens_are_streamed_while_postgres_holds_up_a_heartbeat(desk: Desk, redis_url: str) -> None:
    job_id = submit(desk.database, LONG)
    desk.offer(job_id)
    assert desk.verdict() == (job_id, "started")
    with redis.Redis.from_url(redis_url) as client, desk.database.connect() as other, other.begin():
        other.execute(text("SELECT FROM jobs WHERE id = :id FOR UPDATE"), {"id": job_id})
        until(lambda: num_blocked(desk.database) == 1)

        num_streamed = num_entries(client, job_id)

        until(lambda: num_entries(client, job_id) > num_streamed + 3)
        assert num_blocked(desk.database) == 1, "the heartbeat still waits"
    assert desk.ledger.cancel([str(job_id)]) == 1
    assert desk.verdict() == (job_id, Terminated.__name__)


def test_jobs_wait_unclaimed_until_the_pipeline_is_ready(desk: Desk) -> None:
    desk.ledger.lost()
    until(lambda: cell(desk.database, "SELECT ready_at IS NULL FROM pipelines WHERE id = 'p'"))
    job_id = submit(desk.database, 4)
    desk.offer(job_id)
    assert state(desk.database, job_id) is JobState.QUEUED

    desk.ledger.ready(identity(desk.executor))

    assert [desk.verdict(), desk.verdict()] == [(job_id, "started"), (job_id, "succeeded")]


@pytest.mark.parametrize("times", [TIMES, Times().scaled(1000)], ids=["usual", "no-heartbeat-for-long"])
def test_a_second_suspect_is_claimed_once_the_first_has_saved_tokens(desk: Desk) -> None:
    first, second = submit(desk.database, LONG), submit(desk.database, LONG)
    change(desk.database, "UPDATE jobs SET crashes = 1")
    for job_id in (first, second):
        desk.offer(job_id)
    assert [desk.verdict(), desk.verdict()] == [(first, "started"), (second, "started")]
    assert saved_tokens(desk.database, first) > 0


def test_waiting_suspects_are_returned_unread_on_close(desk: Desk) -> None:
    desk.engine.unwire()
    first, second = submit(desk.database, LONG), submit(desk.database, LONG)
    change(desk.database, "UPDATE jobs SET crashes = 1")
    for job_id in (first, second):
        desk.offer(job_id)
    assert desk.verdict() == (first, "started")
    good = submit(desk.database, LONG)
    desk.offer(good)

    desk.ledger.close()

    assert {desk.verdict(), desk.verdict()} == {(second, Ignore.__name__), (good, Ignore.__name__)}
    assert [state(desk.database, job_id) for job_id in (second, good)] == [JobState.QUEUED] * 2


def test_a_job_that_breaks_the_pipeline_alone_is_counted_to_its_end(desk: Desk) -> None:
    desk.engine.unwire()
    job_id = submit(desk.database, LONG, max_crashes=2)
    for fence, verdict in ((1, Ignore.__name__), (2, JobFailed.__name__)):
        desk.offer(job_id)
        assert desk.verdict() == (job_id, "started")
        desk.ledger.report([Crashed(key=(str(job_id), fence))])
        assert desk.verdict() == (job_id, verdict)
    assert state(desk.database, job_id) is JobState.FAILED
    error = cell(desk.database, "SELECT error FROM jobs WHERE id = :id", id=job_id)
    assert (error["code"], [attempt["fence"] for attempt in error["attempts"]]) == ("crashed", [2, 1])
    assert (desk.blamed("crashed"), desk.blamed("failed"), desk.blamed("lost")) == (1, 1, 0)


def test_a_blamed_job_with_tokens_keeps_them_and_counts_no_crash(desk: Desk) -> None:
    job_id = submit(desk.database, LONG)
    desk.offer(job_id)
    assert desk.verdict() == (job_id, "started")
    until(lambda: saved_tokens(desk.database, job_id) > 0)

    desk.ledger.report([Crashed(key=(str(job_id), 1))])

    assert desk.verdict() == (job_id, Ignore.__name__)
    assert cell(desk.database, "SELECT outcome FROM attempts WHERE job_id = :id", id=job_id) == "lost"
    assert (desk.blamed("lost"), desk.blamed("crashed")) == (1, 0)
    assert cell(desk.database, "SELECT crashes FROM jobs WHERE id = :id", id=job_id) == 0


def test_jobs_offered_during_shutdown_are_returned_unread(desk: Desk) -> None:
    desk.ledger.close()
    job_id = submit(desk.database, 4)

    desk.offer(job_id)

    assert desk.verdict() == (job_id, Ignore.__name__)
    assert state(desk.database, job_id) is JobState.QUEUED


def test_a_job_that_outgrows_the_kv_ends_with_the_same_tokens(desk: Desk) -> None:
    whole, outgrown = submit(desk.database, 300), submit(desk.database, 300)
    desk.offer(whole)
    assert [desk.verdict(), desk.verdict()] == [(whole, "started"), (whole, "succeeded")]
    desk.rebuild(num_blocks=2)

    desk.offer(outgrown)

    assert [desk.verdict(), desk.verdict()] == [(outgrown, "started"), (outgrown, Ignore.__name__)]
    assert (state(desk.database, outgrown), saved_tokens(desk.database, outgrown)) == (JobState.QUEUED, 127)
    desk.offer(outgrown)
    assert desk.verdict() == (outgrown, Ignore.__name__), "it is not claimed by that pipeline again"
    late = "SELECT not_before > now() AND sent_at IS NULL FROM jobs WHERE id = :id"
    assert cell(desk.database, late, id=outgrown)
    desk.rebuild(num_blocks=8)
    change(desk.database, "UPDATE jobs SET not_before = now() WHERE id = :id", id=outgrown)
    desk.offer(outgrown)
    assert [desk.verdict(), desk.verdict()] == [(outgrown, "started"), (outgrown, "succeeded")]
    tokens = "SELECT token_ids FROM results WHERE job_id = :id"
    assert cell(desk.database, tokens, id=outgrown) == cell(desk.database, tokens, id=whole)
    assert cell(desk.database, "SELECT crashes FROM jobs WHERE id = :id", id=outgrown) == 0


def test_two_of_three_jobs_are_parked_while_the_kv_holds_one(desk: Desk) -> None:
    desk.rebuild(num_blocks=1)
    desk.engine.unwire()
    first, *others = ids = [submit(desk.database, 12) for _ in range(3)]
    for job_id in ids:
        desk.offer(job_id)
    assert {desk.verdict() for _ in ids} == {(job_id, "started") for job_id in ids}
    is_parked = "SELECT parked FROM attempts WHERE job_id = :id AND fence = 1"
    assert [cell(desk.database, is_parked, id=job_id) for job_id in ids] == [False, True, True]

    desk.rebuild(num_blocks=1)

    assert [desk.verdict() for _ in ids] == [(job_id, "succeeded") for job_id in (first, *others)]
    assert [cell(desk.database, is_parked, id=job_id) for job_id in ids] == [False] * 3


def test_a_parked_job_taken_by_a_relay_does_not_run_here(desk: Desk) -> None:
    desk.rebuild(num_blocks=1)
    desk.engine.unwire()
    first, parked = submit(desk.database, 12), submit(desk.database, 12)
    for job_id in (first, parked):
        desk.offer(job_id)
    assert [desk.verdict(), desk.verdict()] == [(first, "started"), (parked, "started")]

    change(desk.database, "UPDATE jobs SET fence = fence + 1, worker = 'other' WHERE id = :id", id=parked)
    desk.rebuild(num_blocks=1)

    assert {desk.verdict(), desk.verdict()} == {(first, "succeeded"), (parked, Ignore.__name__)}
    assert saved_tokens(desk.database, parked) == 0


def test_no_running_job_fails_when_a_stage_returns_with_less_kv(desk: Desk) -> None:
    job_id = submit(desk.database, LONG)
    desk.offer(job_id)
    assert desk.verdict() == (job_id, "started")
    until(lambda: saved_tokens(desk.database, job_id) > 130)

    desk.rebuild(num_blocks=2)

    assert desk.verdict() == (job_id, Ignore.__name__)
    assert state(desk.database, job_id) is JobState.QUEUED
    assert saved_tokens(desk.database, job_id) > 130


def test_a_head_that_is_held_back_calls_no_answer_late(executor: Executor) -> None:
    scheduler = Scheduler(scheduler_config())
    engine = HeadEngine(executor, scheduler, emit=lambda _: None, on_lost=lambda *_: None)
    scheduler.add(engine_request(), Numbers(1))
    assert scheduler.schedule() is not None
    assert engine.num_awaited == 1

    engine.is_fenced = True

    assert engine.num_awaited == 0


@pytest.mark.parametrize("times", [TIMES.model_copy(update={"lease_s": 3_600.0})], ids=["lease of an hour"])
def test_a_head_makes_no_step_after_suspension_before_a_heartbeat(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    suspended_s = [0.0]
    for module in (engine_module, heartbeater_module, claiming_module):
        monkeypatch.setattr(module, "lease_clock_s", lambda: lease_clock_s() + suspended_s[0])
    job_id = submit(desk.database, LONG)
    desk.offer(job_id)
    assert desk.verdict() == (job_id, "started")
    until(lambda: saved_tokens(desk.database, job_id) > 0)

    with desk.database.connect() as other, other.begin():
        other.execute(text("SELECT FROM jobs WHERE id = :id FOR UPDATE"), {"id": job_id})
        suspended_s[0] = 7_200.0
        until(lambda: desk.engine.is_fenced)
        num_steps = desk.engine.progress.num_steps
        for _ in range(3):
            turned = threading.Event()
            desk.engine.inbox.put(turned.set)
            assert turned.wait(30)
        assert desk.engine.progress.num_steps == num_steps
    until(lambda: desk.engine.progress.num_steps > num_steps)

    assert desk.ledger.cancel([str(job_id)]) == 1
    assert desk.verdict() == (job_id, Terminated.__name__)
