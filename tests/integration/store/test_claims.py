"""The heads' statements on a real Postgres: claim, heartbeat, end, release, and every write under a
fence."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Engine, text

from shardline.contract.chat import FunctionDefinition, Tool
from shardline.contract.job import JobState, TokenLogprob
from shardline.contract.structured_output import StructuredOutput
from shardline.contract.tables import LEASES_CHANNEL
from shardline.store import jobs, pipelines
from shardline.store.connection.database import connect
from shardline.store.connection.notify import listening
from shardline_server.store import claims, crashes, ends, leases, outbox
from shardline_server.store.claims import ClaimedJob
from shardline_server.store.leases import Beat, BeatReply
from tests.integration.rows import (
    HEAD,
    LONG_S,
    cell,
    change,
    claim,
    end,
    pass_time,
    release,
    request,
    running,
    state,
    submit,
    success,
)
from tests.polling import until

HOLDS = BeatReply(renewed=True, cancel_requested=False, expired=False)
RELEASED = "SELECT outcome FROM attempts WHERE job_id = :id AND fence = :fence"
TOKENS = "SELECT tokens FROM attempts WHERE job_id = :id AND fence = :fence"


def beat(
    engine: Engine, claimed: ClaimedJob, start: int = 0, *ids: int, logprobs: bool = False
) -> BeatReply | None:
    """One heartbeat in a transaction of its own."""
    entries = tuple(TokenLogprob(token_id, float("-inf"), ((token_id, -0.25),)) for token_id in ids)
    one = Beat(
        job_id=claimed.job_id,
        fence=claimed.fence,
        start=start,
        ids=ids,
        logprobs=entries if logprobs else (),
    )
    with engine.begin() as connection:
        return leases.heartbeat(connection, [one], lease_s=LONG_S).get(
            (claimed.job_id, claimed.fence)
        )


def of(engine: Engine, query: str, claimed: ClaimedJob) -> Any:
    """A value of this claim's attempt."""
    return cell(engine, query, id=claimed.job_id, fence=claimed.fence)


def test_claiming_prepared_jobs_gives_the_head_all_it_needs(engine: Engine) -> None:
    ids = submit(engine, 3, seed=11, temperature=0.5, priority=2)
    claimed = claim(engine, ids)
    assert {one.job_id for one in claimed} == set(ids)
    one = claimed[0]
    assert (one.fence, one.prompt_ids, one.output_ids, one.max_tokens, one.seed) == (
        1,
        (5, 6),
        (),
        8,
        11,
    )
    assert (one.params.temperature, one.priority, one.crashes, one.exact) == (0.5, 2, 0, True)
    assert one.queued_s >= 0
    assert state(engine, one.job_id) is JobState.RUNNING
    assert claim(engine, ids) == []


@pytest.mark.parametrize(
    "change_row",
    [
        "not_before = now() + interval '1 hour'",
        "deadline_at = now() - interval '1 second'",
        "cancel_requested_at = now()",
        "prepared_at = NULL",
        "model = 'another'",
        "state = 'failed', finished_at = now()",
    ],
)
def test_a_job_that_may_not_run_is_not_claimed(engine: Engine, change_row: str) -> None:
    (job_id,) = submit(engine)
    change(engine, f"UPDATE jobs SET {change_row}")
    assert claim(engine, [job_id]) == []


def test_a_claim_leaves_a_job_whose_engine_died_since_it_was_read(engine: Engine) -> None:
    innocent, poison = submit(engine, 2)
    with engine.begin() as connection:
        assert crashes.quarantined(connection, [str(innocent), str(poison)]) == []
    change(engine, "UPDATE jobs SET crashes = 1 WHERE id = :id", id=poison)

    assert [one.job_id for one in claim(engine, [innocent, poison], with_quarantined=False)] == [
        innocent
    ]
    assert [one.job_id for one in claim(engine, [poison], with_quarantined=True)] == [poison]


def test_a_claim_leaves_a_job_that_crashes_meanwhile(engine: Engine) -> None:
    (poison,) = submit(engine)
    with engine.begin() as relay:
        relay.execute(text("UPDATE jobs SET crashes = 1 WHERE id = :id"), {"id": poison})
        assert claim(engine, [poison], with_quarantined=False) == []
    assert claim(engine, [poison], with_quarantined=False) == []
    assert len(claim(engine, [poison])) == 1


def test_a_head_of_an_older_epoch_claims_nothing(engine: Engine) -> None:
    ids = submit(engine)
    with engine.begin() as connection:
        head = {"model": "m", "fingerprint": "w", "head": "h2"}
        assert pipelines.take_epoch(connection, "p", **head, lease_s=LONG_S, held=1) == 2
    assert claim(engine, ids, head=HEAD) == []
    assert claim(engine, ids, head=replace(HEAD, epoch=2)) != []


def test_a_job_claimed_by_many_heads_has_one_holder(engine: Engine) -> None:
    ids = submit(engine, 40)
    gate = threading.Barrier(4)

    def race(number: int) -> list[ClaimedJob]:
        gate.wait()
        return claim(engine, ids[::-1] if number % 2 else ids)

    with ThreadPoolExecutor(4) as threads:
        claimed = [one.job_id for batch in threads.map(race, range(4)) for one in batch]
    assert sorted(claimed) == sorted(ids)


def test_a_concurrent_cancel_ends_the_job_or_reaches_its_head(engine: Engine) -> None:
    ids = submit(engine, 40)
    gate = threading.Barrier(2)

    def cancel() -> None:
        gate.wait()
        for job_id in ids:
            with engine.begin() as connection:
                jobs.request_cancel(connection, [job_id])

    def take() -> list[ClaimedJob]:
        gate.wait()
        return [one for job_id in ids for one in claim(engine, [job_id])]

    with ThreadPoolExecutor(2) as threads:
        cancelling = threads.submit(cancel)
        taking = threads.submit(take)
        cancelling.result()
        claimed = {one.job_id: one for one in taking.result()}
    for job_id in ids:
        if job_id in claimed:
            reply = beat(engine, claimed[job_id])
            assert reply is not None
            assert reply.cancel_requested
        else:
            assert state(engine, job_id) is JobState.CANCELLED


def test_a_job_that_ran_before_is_claimed_with_the_next_fence(engine: Engine) -> None:
    (job_id,) = submit(engine)
    change(engine, "UPDATE jobs SET fence = 7")
    (claimed,) = claim(engine, [job_id])
    assert claimed.fence == 8


def test_tokens_and_logprobs_of_a_resumed_job_go_on(engine: Engine) -> None:
    first = running(engine)
    assert beat(engine, first, 0, 7, 8, logprobs=True) == HOLDS
    assert release(engine, first)
    (second,) = claim(engine, [first.job_id])
    assert (second.fence, second.output_ids) == (2, (7, 8))
    assert second.logprobs == (
        TokenLogprob(7, -9999.0, ((7, -0.25),)),
        TokenLogprob(8, -9999.0, ((8, -0.25),)),
    )
    assert of(engine, RELEASED, first) == "released"


def test_a_repeated_heartbeat_stores_its_tokens_once(engine: Engine) -> None:
    claimed = running(engine)
    beat(engine, claimed, 0, 1, 2, 3, logprobs=True)
    for _ in range(2):
        assert beat(engine, claimed, 3, 4, 5, logprobs=True) == HOLDS
    assert of(engine, TOKENS, claimed) == [1, 2, 3, 4, 5]
    assert beat(engine, claimed, 1, 9, logprobs=True) == HOLDS
    assert of(engine, TOKENS, claimed) == [1, 9]
    logprobs = of(
        engine, "SELECT logprobs FROM attempts WHERE job_id = :id AND fence = :fence", claimed
    )
    assert [entry[0] for entry in logprobs] == [1, 9]


def test_a_head_that_skips_tokens_loses_its_claim(engine: Engine) -> None:
    claimed = running(engine)
    assert beat(engine, claimed, 2, 4) is None
    assert of(engine, TOKENS, claimed) == []


def test_a_heartbeat_hears_of_a_passed_deadline(engine: Engine) -> None:
    claimed = running(engine)
    with engine.begin() as connection:
        pass_time(connection, claimed.job_id, "deadline_at")
    assert beat(engine, claimed) == replace(HOLDS, expired=True)


def test_a_heartbeat_writes_no_index_of_jobs(engine: Engine) -> None:
    claimed = running(engine)
    change(engine, "SELECT pg_stat_force_next_flush()")
    query = "SELECT n_tup_upd - n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'jobs'"
    before = cell(engine, query)
    for _ in range(5):
        beat(engine, claimed)
    change(engine, "SELECT pg_stat_force_next_flush()")
    assert cell(engine, query) == before


def test_a_write_under_a_stale_fence_changes_nothing(engine: Engine) -> None:
    stale = running(engine)
    release(engine, stale)
    (fresh,) = claim(engine, [stale.job_id])
    assert beat(engine, stale, 0, 1) is None
    assert not release(engine, stale)
    assert end(engine, success(stale)) == {}
    assert state(engine, fresh.job_id) is JobState.RUNNING
    assert of(engine, TOKENS, stale) == []
    assert of(engine, TOKENS, fresh) == []
    assert cell(engine, "SELECT count(*) FROM results") == 0


def test_relays_hear_of_leases_that_a_new_head_ends_and_of_no_others(
    database_url: str, engine: Engine
) -> None:
    running(engine)
    with listening(database_url, LEASES_CHANNEL) as bell:
        for pipeline, is_heard in (("another", False), ("p", True)):
            with engine.begin() as connection:
                leases.expire_held_by(connection, worker="h", pipeline=pipeline)
            assert bell.wait(10 if is_heard else 0) == is_heard


def test_heads_relays_and_doors_lock_many_rows_without_deadlock(engine: Engine) -> None:
    ids = submit(engine, 60)
    claimed = {one.job_id: one for one in claim(engine, ids)}
    gate = threading.Barrier(3)

    def many(action: str) -> None:
        gate.wait()
        for turn in range(10):
            order = ids if turn % 2 else ids[::-1]
            with engine.begin() as connection:
                if action == "beat":
                    beats = [Beat(job_id=one, fence=claimed[one].fence, start=0) for one in order]
                    leases.heartbeat(connection, beats, lease_s=LONG_S)
                elif action == "cancel":
                    jobs.request_cancel(connection, order)
                else:
                    ends.end_running(
                        connection,
                        [success(claimed[one]) for one in order[turn * 3 : turn * 3 + 6]],
                    )

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(many, ["beat", "cancel", "end"]))


def test_a_session_idle_in_transaction_loses_its_locks(database_url: str, engine: Engine) -> None:
    claimed = running(engine)
    frozen = connect(database_url, idle_timeout_s=0.2)
    with closing(frozen.raw_connection()) as hung:
        hung.cursor().execute("SELECT 1 FROM jobs FOR UPDATE")
        until(lambda: end(engine, success(claimed)) == {claimed.job_id: JobState.SUCCEEDED})
        hung.invalidate()
    frozen.dispose()


def test_jobs_longer_than_the_kv_are_left_for_a_larger_pipeline(engine: Engine) -> None:
    prepared = [((5,) * num_prompt, 8) for num_prompt in (16, 17)]
    with engine.begin() as connection:
        fits, too_long = (
            one.job_id for one in jobs.insert_jobs(connection, [request()] * 2, prepared=prepared)
        )
        pipelines.ready(connection, "p", 1, seats=4, stages=[], exact=True, kv_tokens=16)
    held = claim(engine, [fits, too_long])
    assert [row.job_id for row in held] == [fits]
    with engine.begin() as connection:
        leases.heartbeat(
            connection, [Beat(job_id=fits, fence=held[0].fence, start=0, ids=(7,))], lease_s=LONG_S
        )
        ends.release_running(connection, [(fits, held[0].fence)])

    assert claim(engine, [fits, too_long]) == [], "its checkpoint counts too"
    with engine.begin() as connection:
        assert claims.postpone_unfit(connection, [fits, too_long], HEAD, wait_s=60) == {
            fits,
            too_long,
        }
        assert outbox.stamp_due(connection, resend_s=1) == [], "they take no place in the window"
        pipelines.ready(connection, "p", 1, seats=4, stages=[], exact=True, kv_tokens=17)
        assert claims.postpone_unfit(connection, [fits, too_long], HEAD, wait_s=60) == set()
    change(engine, "UPDATE jobs SET not_before = now()")
    assert {row.job_id: row.output_ids for row in claim(engine, [fits, too_long])} == {
        fits: (7,),
        too_long: (),
    }


def test_the_properties_of_a_schema_and_of_a_tool_keep_their_order(engine: Engine) -> None:
    # Given an object whose keys Postgres would sort by their length
    properties = {"reasoning": {"type": "string"}, "answer": {"type": "string"}}
    schema = {"type": "object", "properties": properties}
    tool = Tool(function=FunctionDefinition(name="say", parameters=schema))
    held = submit(engine, 1, structured_outputs=StructuredOutput(json=schema))
    calling = submit(engine, 1, tools=(tool,))

    (one, other) = (claim(engine, ids)[0].params for ids in (held, calling))

    expected = json.dumps(schema, separators=(",", ":"))
    assert one.structured_outputs is not None
    assert one.structured_outputs.json == expected
    assert json.dumps(other.tools[0].function.schema, separators=(",", ":")) == expected
