"""Ends of jobs on a real Postgres: written once, each with its own result, and heard of by relays
and doors."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import IntegrityError

from shardline.contract.job import FinishReason, JobState, Result, Usage
from shardline.contract.tables import DONE_CHANNEL, JOBS_CHANNEL
from shardline.store import jobs
from shardline.store.connection.notify import listening
from shardline_server.store.claims import ClaimedJob
from shardline_server.store.ends import End
from tests.integration.rows import (
    cell,
    change,
    claim,
    end,
    release,
    running,
    state,
    submit,
    success,
)

RELEASED = "SELECT outcome FROM attempts WHERE job_id = :id AND fence = :fence"


def of(engine: Engine, query: str, claimed: ClaimedJob) -> Any:
    """A value of this claim's attempt."""
    return cell(engine, query, id=claimed.job_id, fence=claimed.fence)


def test_row_result_and_attempt_agree_on_a_finished_job(engine: Engine) -> None:
    claimed = running(engine)
    assert end(engine, success(claimed, 7, 8, 1)) == {claimed.job_id: JobState.SUCCEEDED}
    with engine.begin() as connection:
        job = jobs.get_job(connection, claimed.job_id)
    assert job is not None
    assert job.state is JobState.SUCCEEDED
    assert job.result == success(claimed, 7, 8, 1).result
    assert of(engine, RELEASED, claimed) == "succeeded"


def test_a_repeated_end_is_still_accepted_and_written_once(engine: Engine) -> None:
    claimed = running(engine)
    for _ in range(2):
        assert end(engine, success(claimed)) == {claimed.job_id: JobState.SUCCEEDED}
    assert cell(engine, "SELECT count(*) FROM results") == 1


def test_each_job_of_a_batch_of_ends_has_its_own(engine: Engine) -> None:
    done, failed, cancelled, stale = claim(engine, submit(engine, 4))
    release(engine, stale)
    partial = Result(
        job_id=cancelled.job_id,
        text="nul \0 and \ud800",
        token_ids=(7,),
        usage=Usage(prompt_tokens=2, completion_tokens=1),
        finish_reason=FinishReason.CANCELLED,
        exact=True,
    )
    states = end(
        engine,
        success(done),
        End(
            job_id=failed.job_id,
            fence=failed.fence,
            state=JobState.FAILED,
            error={"code": "broken"},
        ),
        End(
            job_id=cancelled.job_id, fence=cancelled.fence, state=JobState.CANCELLED, result=partial
        ),
        success(stale),
    )
    assert states == {
        done.job_id: "succeeded",
        failed.job_id: "failed",
        cancelled.job_id: "cancelled",
    }
    with engine.begin() as connection:
        one, other = jobs.get_jobs(connection, [failed.job_id, cancelled.job_id])
    assert (one.error, one.result) == ({"code": "broken"}, None)
    assert other.result is not None
    assert (other.result.text, other.result.finish_reason) == (
        "nul \ufffd and ?",
        FinishReason.CANCELLED,
    )


def test_a_released_job_is_sent_again_at_once_without_a_crash(engine: Engine) -> None:
    claimed = running(engine)
    change(engine, "UPDATE jobs SET sent_at = now(), num_sends = 4")
    release(engine, claimed)
    row = cell(
        engine,
        "SELECT (state, crashes, sent_at IS NULL, num_sends, lease_until IS NULL)::text FROM jobs",
    )
    assert row == "(queued,0,t,0,t)"


def test_bells_ring_when_jobs_arrive_and_end(database_url: str, engine: Engine) -> None:
    with (
        listening(database_url, JOBS_CHANNEL) as arrivals,
        listening(database_url, DONE_CHANNEL) as done,
    ):
        claimed = running(engine)
        assert arrivals.wait(10)
        end(engine, success(claimed))
        assert done.wait(10)
        assert not arrivals.wait(0)


@pytest.mark.parametrize(
    "save",
    [
        "state = 'queued', fence = 0, finished_at = NULL, worker = NULL",
        "state = 'queued', finished_at = NULL",
        "state = 'failed'",
    ],
    ids=["a stale save", "a requeue by hand", "another end"],
)
def test_an_update_cannot_change_how_a_job_ended(engine: Engine, save: str) -> None:
    claimed = running(engine)
    end(engine, success(claimed))
    with pytest.raises(IntegrityError, match=r"is succeeded and cannot change.*shardline retry"):
        change(engine, f"UPDATE jobs SET {save}")
    change(engine, "UPDATE jobs SET metadata = '{\"seen\": true}', state = state, fence = fence")
    assert state(engine, claimed.job_id) is JobState.SUCCEEDED


def test_an_update_cannot_lower_the_fence_of_a_running_job(engine: Engine) -> None:
    claimed = running(engine)
    with pytest.raises(IntegrityError, match=r"fence of job .* is 1 and cannot become 0"):
        change(engine, "UPDATE jobs SET state = 'queued', fence = 0, lease_until = NULL")
    assert end(engine, success(claimed)) == {claimed.job_id: JobState.SUCCEEDED}


def test_a_new_prompt_of_a_tokenized_job_is_refused_until_the_job_has_ended(engine: Engine) -> None:
    change(engine, "INSERT INTO jobs (model, prompt) VALUES ('m', 'first')")
    change(engine, "UPDATE jobs SET prompt = 'second'")
    claimed = running(engine)
    edit = "UPDATE jobs SET prompt = 'third' WHERE id = :id"
    with pytest.raises(IntegrityError, match=r"was tokenized and keeps its prompt: cancel it"):
        change(engine, edit, id=claimed.job_id)
    change(engine, "UPDATE jobs SET prompt = prompt, messages = messages")
    end(engine, success(claimed))
    change(engine, edit, id=claimed.job_id)
    assert cell(engine, "SELECT array_agg(prompt ORDER BY prompt) FROM jobs") == ["second", "third"]
