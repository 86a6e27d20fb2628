"""Jobs of a head whose KV is too small for them: they are parked, or wait for a larger pipeline."""

from __future__ import annotations

from celery.exceptions import Ignore

from shardline.contract.job import JobState
from tests.integration.rows import cell, change, state
from tests.integration.stage.jobs.lone_head import (
    LONG,
    LoneHead,
    saved_tokens,
    submit,
)
from tests.polling import until


def test_a_job_that_outgrows_the_kv_ends_with_the_same_tokens(head: LoneHead) -> None:
    whole = submit(head.database, 300)
    outgrown = submit(head.database, 300)
    head.offer(whole)
    assert [head.verdict(), head.verdict()] == [(whole, "started"), (whole, "succeeded")]
    head.rebuild(num_blocks=2)

    head.offer(outgrown)

    assert [head.verdict(), head.verdict()] == [(outgrown, "started"), (outgrown, Ignore.__name__)]
    assert (state(head.database, outgrown), saved_tokens(head.database, outgrown)) == (
        JobState.QUEUED,
        127,
    )
    head.offer(outgrown)
    assert head.verdict() == (outgrown, Ignore.__name__), "it is not claimed by that pipeline again"
    late = "SELECT not_before > now() AND sent_at IS NULL FROM jobs WHERE id = :id"
    assert cell(head.database, late, id=outgrown)
    head.rebuild(num_blocks=8)
    change(head.database, "UPDATE jobs SET not_before = now() WHERE id = :id", id=outgrown)
    head.offer(outgrown)
    assert [head.verdict(), head.verdict()] == [(outgrown, "started"), (outgrown, "succeeded")]
    tokens = "SELECT token_ids FROM results WHERE job_id = :id"
    assert cell(head.database, tokens, id=outgrown) == cell(head.database, tokens, id=whole)
    assert cell(head.database, "SELECT crashes FROM jobs WHERE id = :id", id=outgrown) == 0


def test_two_of_three_jobs_are_parked_while_the_kv_holds_one(head: LoneHead) -> None:
    head.rebuild(num_blocks=1)
    head.engine.unwire()
    first, *others = ids = [submit(head.database, 12) for _ in range(3)]
    for job_id in ids:
        head.offer(job_id)
    assert {head.verdict() for _ in ids} == {(job_id, "started") for job_id in ids}
    is_parked = "SELECT parked FROM attempts WHERE job_id = :id AND fence = 1"
    assert [cell(head.database, is_parked, id=job_id) for job_id in ids] == [False, True, True]

    head.rebuild(num_blocks=1)

    assert [head.verdict() for _ in ids] == [(job_id, "succeeded") for job_id in (first, *others)]
    assert [cell(head.database, is_parked, id=job_id) for job_id in ids] == [False] * 3


def test_a_parked_job_taken_by_a_relay_does_not_run_here(head: LoneHead) -> None:
    head.rebuild(num_blocks=1)
    head.engine.unwire()
    first = submit(head.database, 12)
    parked = submit(head.database, 12)
    for job_id in (first, parked):
        head.offer(job_id)
    assert [head.verdict(), head.verdict()] == [(first, "started"), (parked, "started")]

    change(
        head.database,
        "UPDATE jobs SET fence = fence + 1, worker = 'other' WHERE id = :id",
        id=parked,
    )
    head.rebuild(num_blocks=1)

    assert {head.verdict(), head.verdict()} == {(first, "succeeded"), (parked, Ignore.__name__)}
    assert saved_tokens(head.database, parked) == 0


def test_no_running_job_fails_when_a_stage_returns_with_less_kv(head: LoneHead) -> None:
    job_id = submit(head.database, LONG)
    head.offer(job_id)
    assert head.verdict() == (job_id, "started")
    until(lambda: saved_tokens(head.database, job_id) > 130)

    head.rebuild(num_blocks=2)

    assert head.verdict() == (job_id, Ignore.__name__)
    assert state(head.database, job_id) is JobState.QUEUED
    assert saved_tokens(head.database, job_id) > 130
