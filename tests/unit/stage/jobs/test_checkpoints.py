"""What one heartbeat saves of many jobs: bounded, in turn, and nothing of those without
log-probabilities put off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

from services.stage.jobs.checkpoints import MAX_REWRITTEN, beats_of
from services.stage.jobs.live_job import LiveJob
from shardline.contract.ids import new_id
from shardline.contract.job import SamplingParams, TokenLogprob
from shardline_server.store.claims import ClaimedJob
from shardline_server.store.leases import Beat

ONE = TokenLogprob(7, -0.5)


def live(num_saved: int, num_new: int, *, with_logprobs: bool = True) -> LiveJob:
    """A job with so many tokens in Postgres, and so many more."""
    num = num_saved + num_new
    claimed = ClaimedJob(
        job_id=new_id(),
        fence=1,
        tenant_id="default",
        prompt_ids=(5,),
        output_ids=(),
        logprobs=None,
        params=SamplingParams(),
        max_tokens=100_000,
        seed=1,
        priority=5,
        crashes=0,
        exact=True,
        queued_s=0.0,
        due_s=0.0,
        age_s=0.0,
    )
    return LiveJob(
        claimed=claimed,
        delivery=cast(Any, SimpleNamespace(number=uuid4())),
        identity=cast(Any, None),
        exact=True,
        ids=[7] * num,
        logprobs=[ONE] * num if with_logprobs else [],
        lease_ends_s=0.0,
        num_saved=num_saved,
    )


def save(jobs: list[LiveJob]) -> list[Beat]:
    """One beat that Postgres has committed."""
    beats = beats_of(jobs)
    for job, beat in zip(jobs, beats, strict=True):
        assert (beat.job_id, beat.start) == (job.job_id, job.num_saved)
        job.num_saved += len(beat.ids)
    return beats


def rewritten(beats: list[Beat]) -> int:
    """Log-probabilities that these write anew."""
    return sum(beat.start + len(beat.logprobs) for beat in beats if beat.logprobs)


def test_each_beat_of_long_jobs_with_logprobs_is_bounded_and_takes_turns() -> None:
    jobs = [live(4_000, 10) for _ in range(64)]
    saved: list[set[object]] = []
    for _ in range(32):
        beats = save(jobs)
        assert 0 < rewritten(beats) <= MAX_REWRITTEN
        saved.append({beat.job_id for beat in beats if beat.ids})
    assert set().union(*saved) == {job.job_id for job in jobs}
    assert sum(map(len, saved)) == 64
    assert all(len(beat.ids) == len(beat.logprobs) for beat in beats)


def test_one_job_over_the_bound_among_small_ones_is_saved_alone_and_soon() -> None:
    jobs = [*(live(1_000, 10) for _ in range(4)), live(2 * MAX_REWRITTEN, 10)]
    first = save(jobs)
    second = save(jobs)
    assert [len(beat.ids) for beat in first] == [10, 10, 10, 10, 0]
    assert [len(beat.ids) for beat in second] == [0, 0, 0, 0, 10]


def test_all_tokens_of_jobs_without_logprobs_are_saved() -> None:
    jobs = [live(100_000, 5, with_logprobs=False) for _ in range(64)]
    assert all(len(beat.ids) == 5 for beat in save(jobs))


def test_first_tokens_among_long_jobs_are_saved_at_once() -> None:
    jobs = [live(4_000, 10) for _ in range(64)]
    for _ in range(3):
        save(jobs)
    assert save([*jobs, live(0, 1)])[-1].ids == (7,)
