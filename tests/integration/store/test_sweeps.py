"""What relays repair, on a real Postgres: leases, deadlines, cancels, poison jobs. Time is moved in
rows."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from uuid import UUID

import pytest
from sqlalchemy import Engine, text

from shardline.contract.job import Job, JobState
from shardline.store import jobs
from shardline_server.store import claims, crashes, leases, sweeps
from shardline_server.store.claims import ClaimedJob
from shardline_server.store.crashes import AttemptLimits
from shardline_server.store.leases import Beat
from shardline_server.store.sweeps import Partial
from tests.integration.rows import (
    HEAD,
    LONG_S,
    cell,
    change,
    claim,
    end,
    pass_time,
    running,
    state,
    submit,
    success,
)

LEASE_S = 0.001


def spell(partial: Partial) -> str:
    """Stands for the model's tokenizer."""
    return f"{partial.model}:{','.join(map(str, partial.ids))}"


def sweep(engine: Engine) -> Counter[str]:
    """Both sweeps, in a transaction each."""
    with engine.begin() as connection:
        moved = sweeps.sweep_expired_leases(connection, spell, lease_s=LEASE_S)
    with engine.begin() as connection:
        return Counter([*moved.values(), *sweeps.sweep_stopped_queued(connection, spell).values()])


def expire(engine: Engine, claimed: ClaimedJob, *ids: int) -> None:
    """The head saved these tokens, then was heard no more."""
    with engine.begin() as connection:
        start = len(claimed.output_ids)
        beat = Beat(job_id=claimed.job_id, fence=claimed.fence, start=start, ids=ids)
        leases.heartbeat(connection, [beat], lease_s=LONG_S)
        pass_time(connection, claimed.job_id, "lease_until")


def read(engine: Engine, job_id: UUID) -> Job:
    """The job as a door sees it."""
    with engine.begin() as connection:
        job = jobs.get_job(connection, job_id)
    assert job is not None
    return job


def test_a_sweep_leaves_a_valid_lease_alone(engine: Engine) -> None:
    claimed = running(engine)
    assert sweep(engine) == Counter()
    assert state(engine, claimed.job_id) is JobState.RUNNING


def test_an_expired_lease_with_new_tokens_is_requeued_without_a_crash(engine: Engine) -> None:
    claimed = running(engine)
    expire(engine, claimed, 7)
    assert sweep(engine) == {"lost": 1}
    job = read(engine, claimed.job_id)
    assert (job.state, job.crashes) == (JobState.QUEUED, 0)
    (again,) = claim(engine, [claimed.job_id])
    assert again.output_ids == (7,)


def test_an_expired_lease_of_a_parked_job_is_requeued_without_a_crash(engine: Engine) -> None:
    """Until it has begun: then nobody can tell any more that it broke nothing."""
    waiting = running(engine)
    begun = running(engine)
    change(engine, "UPDATE jobs SET crashes = 1")
    with engine.begin() as connection:
        claims.park(connection, [(one.job_id, one.fence) for one in (waiting, begun)])
        assert claims.begin_held(connection, [(begun.job_id, begun.fence)]) == {begun.job_id}
    expire(engine, waiting)
    expire(engine, begun)

    assert sweep(engine) == {"released": 1, "crashed": 1}

    assert (read(engine, waiting.job_id).crashes, read(engine, begun.job_id).crashes) == (1, 2)


def test_a_parked_job_that_was_taken_back_is_lost_to_its_head(engine: Engine) -> None:
    claimed = running(engine)
    with engine.begin() as connection:
        claims.park(connection, [(claimed.job_id, claimed.fence)])
    expire(engine, claimed)
    sweep(engine)

    with engine.begin() as connection:
        assert claims.begin_held(connection, [(claimed.job_id, claimed.fence)]) == set()


def test_the_sweep_requeues_only_what_a_restarted_heads_predecessor_held(engine: Engine) -> None:
    left = running(engine)
    elsewhere = running(engine, head=replace(HEAD, worker="h2"))
    of_another = running(engine)
    change(engine, "UPDATE jobs SET pipeline = 'q' WHERE id = :id", id=of_another.job_id)
    with engine.begin() as connection:
        assert leases.expire_held_by(connection, worker="h", pipeline="p") == 1

    assert sweep(engine) == {"crashed": 1}

    assert state(engine, left.job_id) is JobState.QUEUED
    assert state(engine, elsewhere.job_id) is state(engine, of_another.job_id) is JobState.RUNNING
    assert end(engine, success(left)) == {}


def test_attempts_without_a_token_of_their_own_end_in_a_dead_letter(engine: Engine) -> None:
    (job_id,) = submit(engine, max_crashes=3)
    for num_crashes in (1, 2):
        (claimed,) = claim(engine, [job_id])
        expire(engine, claimed)
        assert sweep(engine) == {"crashed": 1}
        assert read(engine, job_id).crashes == num_crashes
    (claimed,) = claim(engine, [job_id])
    assert claimed.crashes == 2
    expire(engine, claimed)
    assert sweep(engine) == {"failed": 1}
    error = read(engine, job_id).error or {}
    assert (
        error["code"],
        error["crashes"],
        [attempt["fence"] for attempt in error["attempts"]],
    ) == (
        "crashed",
        3,
        [3, 2, 1],
    )


def test_no_job_outlives_more_crashes_than_the_installation_allows(engine: Engine) -> None:
    swept = submit(engine, max_crashes=100)[0]
    held = submit(engine, max_crashes=100)[0]
    limits = AttemptLimits(max_crashes=2)
    for outcome in ("crashed", "failed"):
        (first,) = claim(engine, [swept])
        (second,) = claim(engine, [held])
        expire(engine, first)
        with engine.begin() as connection:
            moved = sweeps.sweep_expired_leases(connection, spell, lease_s=LEASE_S, limits=limits)
            back = crashes.requeue_or_fail_held(connection, [(held, second.fence)], limits=limits)
        assert (moved, back) == ({swept: outcome}, {held: outcome})
    assert [(read(engine, job_id).error or {})["crashes"] for job_id in (swept, held)] == [2, 2]


def test_a_crash_is_forgotten_once_the_next_attempt_saves_a_token(engine: Engine) -> None:
    claimed = running(engine)
    expire(engine, claimed)
    assert sweep(engine) == {"crashed": 1}
    (again,) = claim(engine, [claimed.job_id])
    expire(engine, again, 7)

    assert sweep(engine) == {"lost": 1}

    assert read(engine, claimed.job_id).crashes == 0


def test_an_expired_lease_with_resumed_tokens_only_is_a_crash(engine: Engine) -> None:
    claimed = running(engine)
    expire(engine, claimed, 7)
    sweep(engine)
    (again,) = claim(engine, [claimed.job_id])
    expire(engine, again)
    assert sweep(engine) == {"crashed": 1}


@pytest.mark.parametrize(
    ("column", "end_state"),
    [("cancel_requested_at", "cancelled"), ("deadline_at", "expired")],
    ids=["cancel", "deadline"],
)
def test_saved_tokens_become_the_result_of_a_stopped_job_without_a_head(
    engine: Engine, column: str, end_state: str
) -> None:
    claimed = running(engine)
    expire(engine, claimed, 7, 8)
    change(engine, f"UPDATE jobs SET {column} = now() - interval '1 second'")
    assert sweep(engine) == {end_state: 1}
    job = read(engine, claimed.job_id)
    assert job.state == end_state
    assert job.result is not None
    assert (job.result.text, job.result.token_ids, job.result.finish_reason) == (
        "m:7,8",
        (7, 8),
        end_state,
    )


def test_a_sweep_ends_a_cancelled_requeued_job_with_its_tokens(engine: Engine) -> None:
    claimed = running(engine)
    expire(engine, claimed, 7)
    sweep(engine)
    with engine.begin() as connection:
        assert jobs.request_cancel(connection, [claimed.job_id]) == {
            claimed.job_id: JobState.QUEUED
        }
    assert sweep(engine) == {"cancelled": 1}
    result = read(engine, claimed.job_id).result
    assert result is not None
    assert result.text == "m:7"
    assert cell(engine, "SELECT outcome FROM attempts") == "lost"


def test_a_job_whose_text_is_not_known_yet_waits_for_the_next_sweep(engine: Engine) -> None:
    waiting = running(engine)
    leased = running(engine)
    expire(engine, waiting, 7)
    sweep(engine)
    expire(engine, leased, 8)
    change(engine, "UPDATE jobs SET cancel_requested_at = now()")

    with engine.begin() as connection:
        assert sweeps.sweep_expired_leases(connection, lambda _: None, lease_s=LEASE_S) == {}
        assert sweeps.sweep_stopped_queued(connection, lambda _: None) == {}

    assert (state(engine, waiting.job_id), state(engine, leased.job_id)) == (
        JobState.QUEUED,
        JobState.RUNNING,
    )
    assert sweep(engine) == {"cancelled": 2}


@pytest.mark.parametrize("is_queued", [False, True], ids=["lease expired", "waiting"])
def test_partial_results_of_megabytes_all_end_a_few_per_sweep(
    engine: Engine, is_queued: bool
) -> None:
    """Five of 3 MB: a sweep begins a row while it has read less than 8."""
    for claimed in claim(engine, submit(engine, 5)):
        expire(engine, claimed, 7)
    if is_queued:
        assert sweep(engine) == {"lost": 5}
    many = "SELECT array_agg((random() * 1e9)::int) FROM generate_series(1, 750000)"
    change(engine, f"UPDATE attempts SET tokens = many FROM ({many}) AS made(many)")
    change(engine, "UPDATE jobs SET cancel_requested_at = now()")
    read_at_once: list[int] = []

    def note(partial: Partial) -> str:
        read_at_once[-1] += len(partial.ids)
        return ""

    def one_sweep() -> int:
        read_at_once.append(0)
        with engine.begin() as connection:
            moved = (
                sweeps.sweep_stopped_queued(connection, note)
                if is_queued
                else sweeps.sweep_expired_leases(connection, note, lease_s=LEASE_S)
            )
        assert set(moved.values()) <= {"cancelled"}
        return len(moved)

    assert [one_sweep() for _ in range(3)] == [3, 2, 0]
    assert read_at_once == [3 * 750_000, 2 * 750_000, 0]


def test_a_partial_result_is_decoded_behind_the_last_tokens_of_its_prompt(engine: Engine) -> None:
    for claimed in claim(engine, submit(engine, 2)):
        expire(engine, claimed, 7)
    change(engine, "UPDATE jobs SET cancel_requested_at = now()")
    change(engine, "UPDATE jobs SET prompt_ids = ARRAY(SELECT generate_series(1, 40))")
    change(
        engine,
        "UPDATE jobs SET prompt_ids = '{4,5}' WHERE id = (SELECT min(id::text)::uuid FROM jobs)",
    )
    ends: list[tuple[int, ...]] = []

    def note(partial: Partial) -> str:
        ends.append(partial.prompt_end)
        return ""

    with engine.begin() as connection:
        sweeps.sweep_expired_leases(connection, note, lease_s=LEASE_S)

    assert sorted(ends) == [(4, 5), tuple(range(25, 41))]


def test_queued_jobs_past_their_deadline_expire_without_a_result(engine: Engine) -> None:
    late, timely = submit(engine, deadline_s=100) + submit(engine, deadline_s=100)
    with engine.begin() as connection:
        pass_time(connection, late, "deadline_at")
    assert sweep(engine) == {"expired": 1}
    assert (read(engine, late).state, read(engine, late).result) == (JobState.EXPIRED, None)
    assert state(engine, timely) is JobState.QUEUED


def test_a_sweep_ends_a_job_cancelled_by_plain_sql(engine: Engine) -> None:
    change(engine, "INSERT INTO jobs (model, prompt) VALUES ('m', 'text')")
    change(engine, "UPDATE jobs SET cancel_requested_at = now()")
    assert sweep(engine) == {"cancelled": 1}


def test_heads_have_one_lease_to_beat_after_a_restart_of_postgres(engine: Engine) -> None:
    claimed = running(engine)
    expire(engine, claimed, 7)
    with engine.begin() as connection:
        assert sweeps.sweep_expired_leases(connection, spell, lease_s=LONG_S) == {}
    assert state(engine, claimed.job_id) is JobState.RUNNING


def test_the_first_write_wins_between_heads_and_relays_after_a_lease(engine: Engine) -> None:
    claimed = claim(engine, submit(engine, 40))
    for one in claimed:
        expire(engine, one, 7)
    gate = threading.Barrier(3)

    def finish() -> dict[UUID, JobState]:
        gate.wait()
        # What a relay has locked is told as running.
        return {
            job_id: ended
            for one in claimed
            for job_id, ended in end(engine, success(one)).items()
            if ended is JobState.SUCCEEDED
        }

    def rescue() -> int:
        gate.wait()
        return sum(_sweep_few(engine) for _ in range(20))

    with ThreadPoolExecutor(3) as threads:
        finishing, *rescuing = (
            threads.submit(finish),
            threads.submit(rescue),
            threads.submit(rescue),
        )
        finished = finishing.result()
        num_rescued = sum(future.result() for future in rescuing)
    assert len(finished) + num_rescued == 40
    assert cell(engine, "SELECT count(*) FROM results") == len(finished)
    for one in claimed:
        assert state(engine, one.job_id) is (
            JobState.SUCCEEDED if one.job_id in finished else JobState.QUEUED
        )


def test_only_jobs_that_have_not_ended_are_counted(engine: Engine) -> None:
    claimed = running(engine)
    submit(engine, 2)
    end(engine, success(running(engine)))
    with engine.begin() as connection:
        assert sweeps.count_active(connection) == {("m", "queued"): 2, ("m", "running"): 1}
    assert claimed.fence == 1


def test_the_count_of_a_long_backlog_stops_at_its_limit_per_model(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = sweeps.COUNTS.text.replace(f"LIMIT {sweeps.MAX_COUNTED}", "LIMIT 3")
    monkeypatch.setattr(sweeps, "COUNTS", text(limited))
    submit(engine, 5)
    running(engine)
    change(
        engine,
        "INSERT INTO jobs (model, prompt) VALUES ('b', 'text'), ('z', 'text'), ('z', 'text')",
    )
    with engine.begin() as connection:
        assert sweeps.count_active(connection) == {
            ("b", "queued"): 1,
            ("m", "queued"): 3,
            ("z", "queued"): 2,
            ("m", "running"): 1,
        }


def _sweep_few(engine: Engine) -> int:
    with engine.begin() as connection:
        return len(sweeps.sweep_expired_leases(connection, spell, lease_s=LEASE_S, max_batch=3))
