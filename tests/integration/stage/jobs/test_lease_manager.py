"""A head's lease manager between a real Postgres, a real engine on a tiny model, and verdicts that
a test reads."""

from __future__ import annotations

import threading
from typing import Any, cast
from uuid import UUID

import pytest
import redis
from celery.exceptions import Ignore, Terminated
from sqlalchemy import text
from structlog.testing import capture_logs

from services.stage.engine import head_engine
from services.stage.engine.executor import Executor
from services.stage.engine.head_engine import HeadEngine
from services.stage.jobs import claimer as claiming_module
from services.stage.jobs import heartbeater as heartbeater_module
from services.stage.jobs.live_job import FORGIVEN_CLAIMS
from shardline.base.clock import lease_clock_s
from shardline.base.config import Times
from shardline.base.errors import JobFailed
from shardline.contract.job import JobState
from shardline.contract.keys import job_stream
from shardline.store import jobs
from shardline_scheduler.events import SequenceCrashed
from shardline_scheduler.scheduler import Scheduler
from tests.integration.rows import cell, change, num_blocked, state
from tests.integration.stage.jobs.lone_head import (
    LONG,
    TIMES,
    LoneHead,
    identity,
    open_lone_head,
    saved_tokens,
    submit,
)
from tests.polling import until
from tests.simulation.pipeline import Numbers
from tests.simulation.pipeline import config as scheduler_config
from tests.simulation.pipeline import request as engine_request


def num_entries(client: redis.Redis, job_id: UUID) -> int:
    """Deltas that were ever written to a job's stream."""
    return int(cast(Any, client.xinfo_stream(job_stream(job_id)))["entries-added"])


def test_an_offered_job_is_claimed_run_committed_and_settled(head: LoneHead) -> None:
    job_id = submit(head.database, 12)

    head.offer(job_id)

    assert head.verdict() == (job_id, "started")
    assert head.verdict() == (job_id, "succeeded")
    with head.database.begin() as connection:
        job = jobs.get_job(connection, job_id)
    assert job is not None
    assert job.result is not None
    assert (job.state, len(job.result.token_ids), job.result.exact) == (
        JobState.SUCCEEDED,
        12,
        True,
    )
    assert job.result.provenance["pipeline"] == "p"
    assert [stage["dtype"] for stage in job.result.provenance["stages"]] == ["float32"]


def test_a_committed_job_is_one_line_of_the_log(head: LoneHead) -> None:
    with capture_logs() as told:
        job_id = submit(head.database, 12)
        head.offer(job_id)
        assert head.verdict() == (job_id, "started")
        assert head.verdict() == (job_id, "succeeded")

    (line,) = [one for one in told if one.get("job_id") == str(job_id)]
    assert (line["event"], line["log_level"], line["outcome"]) == ("job ended", "info", "succeeded")
    assert (line["model"], line["reason"], line["completion_tokens"]) == ("m", "length", 12)
    assert {"prompt_tokens", "queued_s", "running_s", "first_token_s"} <= line.keys()


def test_a_refused_statement_is_logged_and_nothing_is_lost_once_it_is_mended(
    head: LoneHead,
) -> None:
    with capture_logs() as told:
        change(head.database, "ALTER TABLE results RENAME TO hidden")
        job_id = submit(head.database, 12)
        head.offer(job_id)
        until(lambda: head.lease_manager.stats()["database_away"])
        change(head.database, "ALTER TABLE hidden RENAME TO results")
        assert head.verdict() == (job_id, "started")
        assert head.verdict() == (job_id, "succeeded")
        until(lambda: not head.lease_manager.stats()["database_away"])
    (line,) = [one for one in told if one["event"].startswith(("Postgres", "postgres"))][:-1]
    assert (line["event"].partition(":")[0], line["log_level"]) == (
        "Postgres refuses a statement",
        "error",
    )
    assert (line["sqlstate"], "results" in line["error"]) == ("42P01", True)
    assert told[-1]["event"] == "Postgres works again"


def test_a_second_delivery_of_a_running_job_is_dropped(head: LoneHead) -> None:
    job_id = submit(head.database, LONG)
    head.offer(job_id)
    assert head.verdict() == (job_id, "started")

    head.offer(job_id)

    assert head.verdict() == (job_id, Ignore.__name__)
    assert state(head.database, job_id) is JobState.RUNNING
    assert head.lease_manager.cancel([str(job_id)]) == 1
    assert head.verdict() == (job_id, Terminated.__name__)
    assert state(head.database, job_id) is JobState.CANCELLED


def test_a_cancel_read_by_the_heartbeat_keeps_the_partial_tokens(head: LoneHead) -> None:
    job_id = submit(head.database, LONG)
    head.offer(job_id)
    assert head.verdict() == (job_id, "started")
    until(lambda: saved_tokens(head.database, job_id) > 0)

    change(head.database, "UPDATE jobs SET cancel_requested_at = now() WHERE id = :id", id=job_id)

    assert head.verdict() == (job_id, Terminated.__name__)
    assert (
        cell(head.database, "SELECT finish_reason FROM results WHERE job_id = :id", id=job_id)
        == "cancelled"
    )
    assert (
        cell(head.database, "SELECT completion_tokens FROM results WHERE job_id = :id", id=job_id)
        > 0
    )
    until(lambda: head.executor.blocks_used == 0)


def test_a_job_past_its_deadline_expires_at_the_heartbeat(head: LoneHead) -> None:
    job_id = submit(head.database, LONG)
    head.offer(job_id)
    assert head.verdict() == (job_id, "started")

    change(head.database, "UPDATE jobs SET deadline_at = now() WHERE id = :id", id=job_id)

    assert head.verdict() == (job_id, Terminated.__name__)
    assert state(head.database, job_id) is JobState.EXPIRED


def test_nothing_more_is_written_once_another_head_holds_the_fence(head: LoneHead) -> None:
    job_id = submit(head.database, LONG)
    head.offer(job_id)
    assert head.verdict() == (job_id, "started")

    change(
        head.database,
        "UPDATE jobs SET fence = fence + 1, worker = 'other' WHERE id = :id",
        id=job_id,
    )

    assert head.verdict() == (job_id, Ignore.__name__)
    assert cell(head.database, "SELECT worker FROM jobs WHERE id = :id", id=job_id) == "other"
    until(lambda: head.executor.blocks_used == 0)


def test_a_released_job_ends_on_another_head_with_the_same_tokens(
    head: LoneHead, redis_url: str
) -> None:
    whole, interrupted = (submit(head.database, 1_500, temperature=0.8) for _ in range(2))
    head.offer(whole)
    assert [head.verdict(), head.verdict()] == [(whole, "started"), (whole, "succeeded")]
    head.offer(interrupted)
    assert head.verdict() == (interrupted, "started")
    until(lambda: saved_tokens(head.database, interrupted) > 0)

    head.lease_manager.give_back()

    assert head.verdict() == (interrupted, Ignore.__name__)
    assert state(head.database, interrupted) is JobState.QUEUED
    with open_lone_head(head.database, head.executor, redis_url, TIMES) as other:
        other.offer(interrupted)
        assert [other.verdict(), other.verdict()] == [
            (interrupted, "started"),
            (interrupted, "succeeded"),
        ]
    tokens = "SELECT token_ids FROM results WHERE job_id = :id"
    assert cell(head.database, tokens, id=interrupted) == cell(head.database, tokens, id=whole)
    assert cell(head.database, "SELECT crashes FROM jobs WHERE id = :id", id=interrupted) == 0


@pytest.mark.parametrize(
    "times", [TIMES.model_copy(update={"lease_s": 3_600.0})], ids=["lease of an hour"]
)
def test_tokens_are_streamed_while_postgres_holds_up_a_heartbeat(
    head: LoneHead, redis_url: str
) -> None:
    job_id = submit(head.database, LONG)
    head.offer(job_id)
    assert head.verdict() == (job_id, "started")
    with redis.Redis.from_url(redis_url) as client, head.database.connect() as other, other.begin():
        other.execute(text("SELECT FROM attempts WHERE job_id = :id FOR UPDATE"), {"id": job_id})
        until(lambda: num_blocked(head.database) == 1)

        num_streamed = num_entries(client, job_id)

        until(lambda: num_entries(client, job_id) > num_streamed + 3)
        assert num_blocked(head.database) == 1, "the heartbeat still waits"
    assert head.lease_manager.cancel([str(job_id)]) == 1
    assert head.verdict() == (job_id, Terminated.__name__)


def test_a_model_that_somebody_deleted_is_registered_again(head: LoneHead) -> None:
    num_models = "SELECT count(*) FROM models"
    change(head.database, "DELETE FROM models")
    until(lambda: cell(head.database, num_models) == 1)
    head.lease_manager.lost()
    until(lambda: cell(head.database, "SELECT ready_at IS NULL FROM pipelines WHERE id = 'p'"))
    change(head.database, "DELETE FROM models")
    head.lease_manager.ready(identity(head.executor))
    until(lambda: cell(head.database, num_models) == 1)


def test_jobs_wait_unclaimed_until_the_pipeline_is_ready(head: LoneHead) -> None:
    head.lease_manager.lost()
    until(lambda: cell(head.database, "SELECT ready_at IS NULL FROM pipelines WHERE id = 'p'"))
    job_id = submit(head.database, 4)
    head.offer(job_id)
    assert state(head.database, job_id) is JobState.QUEUED

    head.lease_manager.ready(identity(head.executor))

    assert [head.verdict(), head.verdict()] == [(job_id, "started"), (job_id, "succeeded")]


@pytest.mark.parametrize(
    "times", [TIMES, Times().scaled(1000)], ids=["usual", "no-heartbeat-for-long"]
)
def test_a_second_suspect_is_claimed_once_the_first_has_saved_tokens(head: LoneHead) -> None:
    first = submit(head.database, LONG)
    second = submit(head.database, LONG)
    change(head.database, "UPDATE jobs SET crashes = 1")
    for job_id in (first, second):
        head.offer(job_id)
    assert [head.verdict(), head.verdict()] == [(first, "started"), (second, "started")]
    assert saved_tokens(head.database, first) > 0


def test_waiting_suspects_are_returned_unread_on_close(head: LoneHead) -> None:
    head.engine.unwire()
    first = submit(head.database, LONG)
    second = submit(head.database, LONG)
    change(head.database, "UPDATE jobs SET crashes = 1")
    for job_id in (first, second):
        head.offer(job_id)
    assert head.verdict() == (first, "started")
    good = submit(head.database, LONG)
    head.offer(good)

    head.lease_manager.close()

    assert {head.verdict(), head.verdict()} == {(second, Ignore.__name__), (good, Ignore.__name__)}
    assert [state(head.database, job_id) for job_id in (second, good)] == [JobState.QUEUED] * 2


def test_a_job_that_breaks_the_pipeline_alone_is_counted_to_its_end(head: LoneHead) -> None:
    head.engine.unwire()
    job_id = submit(head.database, LONG, max_crashes=2)
    for fence, verdict in ((1, Ignore.__name__), (2, JobFailed.__name__)):
        head.offer(job_id)
        assert head.verdict() == (job_id, "started")
        break_under(head, job_id, fence)
        head.form(fence + 1, f"after {fence} deaths")
        assert head.verdict() == (job_id, verdict)
    assert state(head.database, job_id) is JobState.FAILED
    error = cell(head.database, "SELECT error FROM jobs WHERE id = :id", id=job_id)
    assert (error["code"], [attempt["fence"] for attempt in error["attempts"]]) == (
        "crashed",
        [2, 1],
    )
    assert (head.blamed("crashed"), head.blamed("failed"), head.blamed("lost")) == (1, 1, 0)


def test_a_job_whose_links_break_while_every_process_lives_counts_no_crash(head: LoneHead) -> None:
    head.engine.unwire()
    job_id = submit(head.database, LONG, max_crashes=1)
    for fence in (1, 2, 3, 4):
        head.offer(job_id)
        assert head.verdict() == (job_id, "started")
        break_under(head, job_id, fence)
        head.form(fence + 1, "first")
        assert head.verdict() == (job_id, Ignore.__name__)
    outcomes = "SELECT array_agg(outcome ORDER BY fence) FROM attempts WHERE job_id = :id"
    assert cell(head.database, outcomes, id=job_id) == ["released"] * 4
    assert cell(head.database, "SELECT crashes FROM jobs WHERE id = :id", id=job_id) == 0
    assert (head.blamed("crashed"), head.blamed("failed")) == (0, 0)


def test_a_job_that_has_been_claimed_too_often_is_blamed_for_a_broken_link(head: LoneHead) -> None:
    head.engine.unwire()
    job_id = submit(head.database, LONG, max_crashes=1)
    change(head.database, "UPDATE jobs SET fence = :fence", fence=FORGIVEN_CLAIMS - 1)
    head.offer(job_id)
    assert head.verdict() == (job_id, "started")
    break_under(head, job_id, FORGIVEN_CLAIMS)
    head.form(2, "first")
    assert head.verdict() == (job_id, JobFailed.__name__)


@pytest.mark.parametrize("times", [TIMES.model_copy(update={"recover_s": 0.1})], ids=["impatient"])
def test_a_job_is_blamed_for_a_pipeline_that_does_not_form_again(head: LoneHead) -> None:
    head.engine.unwire()
    job_id = submit(head.database, LONG, max_crashes=1)
    head.offer(job_id)
    assert head.verdict() == (job_id, "started")
    break_under(head, job_id, 1)
    head.lease_manager.lost()
    assert head.verdict() == (job_id, JobFailed.__name__)


def break_under(head: LoneHead, job_id: UUID, fence: int) -> None:
    """As the engine tells it of a job that ran alone and got no token."""
    head.lease_manager.report([SequenceCrashed(key=(str(job_id), fence))])


def test_a_blamed_job_with_tokens_keeps_them_and_counts_no_crash(head: LoneHead) -> None:
    job_id = submit(head.database, LONG)
    head.offer(job_id)
    assert head.verdict() == (job_id, "started")
    until(lambda: saved_tokens(head.database, job_id) > 0)

    break_under(head, job_id, 1)
    head.form(2, "second")

    assert head.verdict() == (job_id, Ignore.__name__)
    assert (
        cell(head.database, "SELECT outcome FROM attempts WHERE job_id = :id", id=job_id) == "lost"
    )
    assert (head.blamed("lost"), head.blamed("crashed")) == (1, 0)
    assert cell(head.database, "SELECT crashes FROM jobs WHERE id = :id", id=job_id) == 0


def test_jobs_offered_during_shutdown_are_returned_unread(head: LoneHead) -> None:
    head.lease_manager.close()
    job_id = submit(head.database, 4)

    head.offer(job_id)

    assert head.verdict() == (job_id, Ignore.__name__)
    assert state(head.database, job_id) is JobState.QUEUED


def test_a_head_that_is_held_back_calls_no_answer_late(executor: Executor) -> None:
    scheduler = Scheduler(scheduler_config())
    engine = HeadEngine(executor, scheduler, emit=lambda _: None, on_lost=lambda *_: None)
    scheduler.add(engine_request(), Numbers(1))
    assert scheduler.schedule() is not None
    assert engine.num_awaited == 1

    engine.is_fenced = True

    assert engine.num_awaited == 0


@pytest.mark.parametrize(
    "times", [TIMES.model_copy(update={"lease_s": 3_600.0})], ids=["lease of an hour"]
)
def test_a_head_makes_no_step_after_suspension_before_a_heartbeat(
    head: LoneHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    suspended_s = [0.0]
    for module in (head_engine, heartbeater_module, claiming_module):
        monkeypatch.setattr(module, "lease_clock_s", lambda: lease_clock_s() + suspended_s[0])
    job_id = submit(head.database, LONG)
    head.offer(job_id)
    assert head.verdict() == (job_id, "started")
    until(lambda: saved_tokens(head.database, job_id) > 0)

    with head.database.connect() as other, other.begin():
        other.execute(text("SELECT FROM attempts WHERE job_id = :id FOR UPDATE"), {"id": job_id})
        suspended_s[0] = 7_200.0
        until(lambda: head.engine.is_fenced)
        num_steps = head.engine.progress.num_steps
        for _ in range(3):
            turned = threading.Event()
            head.engine.inbox.put(turned.set)
            assert turned.wait(30)
        assert head.engine.progress.num_steps == num_steps
    until(lambda: head.engine.progress.num_steps > num_steps)

    assert head.lease_manager.cancel([str(job_id)]) == 1
    assert head.verdict() == (job_id, Terminated.__name__)
