"""The simulation's twins of statements against a real Postgres: the same random operations of the
store on both, the same answers, the same rows.

So the model cannot drift, and a condition that is lost from a statement of the store is seen here
too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, cast
from uuid import UUID

import msgspec
import pytest
from sqlalchemy import Engine, text

from shardline.contract.job import FinishReason, JobRequest, JobState, Result, SamplingParams, Usage
from shardline.contract.retry_policy import RetryPolicy
from shardline.store import jobs, pipelines
from shardline_server.store import claims, crashes, ends, leases, outbox, sweeps
from shardline_server.store.claims import Claimant
from shardline_server.store.ends import End
from shardline_server.store.leases import Beat
from shardline_server.store.sweeps import Partial
from tests.conformance.row_pair import MINUTE_S, Pair
from tests.integration.rows import MODEL, cell, database_with_head
from tests.simulation.rows import Job

TICK_S = 25 * MINUTE_S
LEASE_S = RESEND_S = 60 * MINUTE_S
EXACT_WAIT_S = 120 * MINUTE_S
"""Time passes in ticks that never meet these on the minute: what the real clock adds does not
matter."""

RETRY = RetryPolicy(
    max_attempts=4,
    backoff_s=12 * MINUTE_S,
    max_backoff_s=24 * MINUTE_S,
    on=("crashed", "engine"),
)
"""Whatever is drawn of its waits, no tick meets their ends."""
NUM_OPERATIONS = 80
SEQUENCES = range(40)

TIMES = {
    "jobs": (
        "created_at",
        "not_before",
        "deadline_at",
        "cancel_requested_at",
        "prepared_at",
        "sent_at",
        "lease_until",
        "requeued_at",
        "finished_at",
    ),
    "pipelines": ("lease_until", "ready_at"),
}


def decode(partial: Partial) -> str:
    """Text of partial results."""
    return " ".join(map(str, (*partial.prompt_end, *partial.ids)))


# Operations
# --------------------------------------------------------------------------------------------------


def submit(pair: Pair) -> None:
    rng = pair.rng
    job_id = UUID(int=rng.getrandbits(128))
    max_tokens = rng.randint(1, 9)
    seed = rng.getrandbits(31)
    adapter = rng.choice([None, "a", "b"])
    delay_s = rng.choice([0.0, 0.0, 40 * MINUTE_S])
    deadline_s = rng.choice([None, None, 90 * MINUTE_S])
    max_crashes = rng.choice([1, 2, 3])
    retry = rng.choice([None, RETRY, RetryPolicy(max_attempts=1)])
    priority = rng.choice([1, 5])
    exact = rng.random() < 0.2
    request = JobRequest(
        model=MODEL,
        prompt=(5, 6),
        id=job_id,
        seed=seed,
        priority=priority,
        max_tokens=max_tokens,
        adapter=adapter,
        delay_s=delay_s,
        deadline_s=deadline_s,
        max_crashes=max_crashes,
        retry=retry,
        exact=exact,
    )
    with pair.engine.begin() as connection:
        jobs.insert_jobs(connection, [request], prepared=[((5, 6), max_tokens)])
    pair.tables.insert(
        Job(
            id=job_id,
            number=next(pair.numbers),
            prompt_ids=(5, 6),
            params=msgspec.to_builtins(
                SamplingParams(max_tokens=max_tokens, exact=exact, adapter=adapter)
            ),
            max_tokens=max_tokens,
            seed=seed,
            created_s=pair.now_s,
            not_before_s=pair.now_s + delay_s,
            deadline_s=None if deadline_s is None else pair.now_s + deadline_s,
            model=MODEL,
            priority=priority,
            max_crashes=max_crashes,
            retry=msgspec.to_builtins(retry),
        )
    )
    pair.ids.append(job_id)


def pass_time(pair: Pair) -> None:
    pair.now_s += TICK_S
    with pair.engine.begin() as connection:
        for table, columns in TIMES.items():
            shifts = ", ".join(
                f"{column} = {column} - make_interval(secs => {TICK_S})" for column in columns
            )
            connection.execute(text(f"UPDATE {table} SET {shifts}"))


def take_epoch(pair: Pair) -> None:
    name, epoch = _pipeline(pair)
    held = pair.rng.choice([epoch, epoch, 0])
    head = {
        "model": MODEL,
        "fingerprint": "w",
        "head": pair.rng.choice("gh"),
        "lease_s": LEASE_S,
        "held": held,
    }
    pair.both(pipelines.take_epoch, name, **head)
    pair.both(pipelines.holder, name)


def leave(pair: Pair) -> None:
    pair.both(pipelines.release, *_pipeline(pair))


def announce(pair: Pair) -> None:
    stages: dict[str, Any] = {
        "stages": [],
        "seats": pair.rng.choice([4, 20]),
        "exact": pair.rng.random() < 0.8,
    }
    stages["kv_tokens"] = pair.rng.choice([64, 64, 64, 3])
    pair.both(pipelines.ready, *_pipeline(pair), **stages)
    pair.both(pipelines.longest)


def unready(pair: Pair) -> None:
    pair.both(pipelines.unready, *_pipeline(pair))


def renew(pair: Pair) -> None:
    pair.both(pipelines.renew, *_pipeline(pair), LEASE_S)


def stamp(pair: Pair) -> None:
    pair.both(outbox.stamp_due, resend_s=RESEND_S)


def unstamp(pair: Pair) -> None:
    pair.both(outbox.unstamp, _some(pair))


def unstamp_sent(pair: Pair) -> None:
    pair.both(outbox.unstamp_sent)


def _claimant(pair: Pair) -> Claimant:
    pipeline, epoch = _pipeline(pair)
    exactness = pair.rng.choice(["x", "x", "y"])
    adapters = {"a": pair.rng.choice(["1", "1", "2"])}
    return Claimant(
        worker="h",
        pipeline=pipeline,
        epoch=epoch,
        fingerprint="w",
        exactness=exactness,
        adapters=adapters,
    )


def claim(pair: Pair) -> None:
    pair.both(
        claims.claim, _some(pair), _claimant(pair), lease_s=LEASE_S, exact_wait_s=EXACT_WAIT_S
    )


def postpone(pair: Pair) -> None:
    pair.both(claims.postpone_unfit, _some(pair), _claimant(pair), wait_s=RESEND_S)


def park(pair: Pair) -> None:
    pair.both(claims.park, [(job_id, _fence(pair, job_id)) for job_id in _some(pair)])


def begin(pair: Pair) -> None:
    pair.both(claims.begin_held, [(job_id, _fence(pair, job_id)) for job_id in _some(pair)])


def beat(pair: Pair) -> None:
    beats = []
    for job_id in _some(pair):
        attempt = pair.tables.attempts.get((job_id, pair.tables.jobs[job_id].fence))
        start = len(attempt.tokens) if attempt else 0
        start = max(0, start + pair.rng.choice([0, 0, 0, -1, -2, 1]))
        ids = tuple(pair.rng.randrange(100) for _ in range(pair.rng.randrange(3)))
        beats.append(Beat(job_id=job_id, fence=_fence(pair, job_id), start=start, ids=ids))
    pair.both(leases.heartbeat, beats, lease_s=LEASE_S)


def end(pair: Pair) -> None:
    pair.both(ends.end_running, [_end(pair, job_id) for job_id in _some(pair)])


def release(pair: Pair) -> None:
    keys = [(job_id, _fence(pair, job_id)) for job_id in _some(pair)]
    pair.both(ends.release_running, keys)


def expire(pair: Pair) -> None:
    pair.both(leases.expire_held_by, worker="h", pipeline=_pipeline(pair)[0])
    # Between its clock's ticks Postgres sees a lease of now as over, the model does not.
    pass_time(pair)


def requeue_or_fail(pair: Pair) -> None:
    keys = [(job_id, _fence(pair, job_id)) for job_id in _some(pair)]
    pair.both(crashes.requeue_or_fail_held, keys)


def requeue_failed(pair: Pair) -> None:
    keys = [(job_id, _fence(pair, job_id)) for job_id in _some(pair)]
    pair.both(crashes.requeue_failed_held, keys)


def quarantined(pair: Pair) -> None:
    ids = [str(job_id) for job_id in pair.ids]
    with pair.engine.begin() as connection:
        found = crashes.quarantined(connection, ids)
    assert sorted(found) == sorted(crashes.quarantined(cast(Any, pair.memory), ids))


def cancel(pair: Pair) -> None:
    pair.both(jobs.request_cancel, _some(pair)[:1])


def sweep_queued(pair: Pair) -> None:
    pair.both(sweeps.sweep_stopped_queued, decode)


def sweep_leases(pair: Pair) -> None:
    pair.both(sweeps.sweep_expired_leases, decode, lease_s=0.0)


OPERATIONS = (
    submit, submit, submit, pass_time, pass_time, take_epoch, leave, announce, announce, unready,
    renew, stamp, stamp, stamp, unstamp, unstamp_sent, claim, claim, claim, claim, park, park, park,
    begin, postpone, postpone, expire, requeue_or_fail, requeue_or_fail, requeue_failed,
    quarantined, beat, beat, beat, beat, beat, beat, end, end, release, release, cancel,
    sweep_queued, sweep_leases, sweep_leases, sweep_leases,
)  # fmt: skip


def _some(pair: Pair) -> list[UUID]:
    """Jobs that run, and the youngest."""
    running = [job_id for job_id in pair.ids if pair.tables.jobs[job_id].state is JobState.RUNNING]
    likely = list(dict.fromkeys((*running, *pair.ids[-6:])))
    return pair.rng.sample(likely, pair.rng.randint(0, min(6, len(likely))))


def _fence(pair: Pair, job_id: UUID) -> int:
    """Mostly the newest."""
    return max(0, pair.tables.jobs[job_id].fence + pair.rng.choice([0, 0, 0, 0, -1, 1]))


def _pipeline(pair: Pair) -> tuple[str, int]:
    name = pair.rng.choice("pppq")
    row = pair.tables.pipelines.get(name)
    return name, max(1, (row.epoch if row else 1) + pair.rng.choice([0, 0, 0, 0, 0, -1]))


def _end(pair: Pair, job_id: UUID) -> End:
    state = pair.rng.choice(
        [JobState.SUCCEEDED, JobState.SUCCEEDED, JobState.CANCELLED, JobState.FAILED]
    )
    fence = _fence(pair, job_id)
    if state is JobState.FAILED:
        return End(job_id=job_id, fence=fence, state=state, error={"code": "engine"})
    reason = FinishReason.STOP if state is JobState.SUCCEEDED else FinishReason.CANCELLED
    ids = tuple(pair.rng.randrange(100) for _ in range(pair.rng.randint(1, 4)))
    usage = Usage(prompt_tokens=2, completion_tokens=len(ids))
    exact = pair.rng.random() < 0.8
    result = Result(
        job_id=job_id, text="t", token_ids=ids, usage=usage, finish_reason=reason, exact=exact
    )
    return End(job_id=job_id, fence=fence, state=state, result=result)


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    with database_with_head(database_url) as engine:
        yield engine


def test_memory_and_postgres_agree_on_answers_and_rows(engine: Engine) -> None:
    for seed in SEQUENCES:
        with engine.begin() as connection:
            connection.execute(text("TRUNCATE jobs, attempts, results, pipelines CASCADE"))
        pair = Pair(engine, random.Random(seed))
        pair.history.append(f"seed {seed}")
        for _ in range(NUM_OPERATIONS):
            pair.rng.choice(OPERATIONS)(pair)
            pair.same_rows()
        assert cell(engine, "SELECT count(*) FROM jobs") == len(pair.ids)
