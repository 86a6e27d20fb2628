"""Claims and exactness on a real Postgres: which pipeline may begin or go on with a job, and what
its row says then."""

from __future__ import annotations

from dataclasses import replace

from sqlalchemy import Engine

from shardline.store import pipelines
from shardline_server.store import claims
from tests.integration.rows import (
    HEAD,
    cell,
    change,
    claim,
    end,
    pass_time,
    release,
    running,
    submit,
    success,
)


def test_a_job_started_with_other_exactness_waits_and_that_is_said(engine: Engine) -> None:
    first = running(engine)
    release(engine, first)
    assert claim(engine, [first.job_id], head=replace(HEAD, exactness="y")) == []
    with engine.begin() as connection:
        pass_time(connection, first.job_id, "requeued_at")
    (second,) = claim(engine, [first.job_id], head=replace(HEAD, exactness="y"), exact_wait_s=60.0)
    assert not second.exact
    release(engine, second)
    (third,) = claim(engine, [first.job_id], head=replace(HEAD, exactness="z"))
    assert not third.exact
    end(engine, success(third))
    assert cell(engine, "SELECT exact FROM results") is False


def test_a_started_job_stays_exact_on_a_head_of_the_same_exactness(engine: Engine) -> None:
    first = running(engine)
    release(engine, first)
    (second,) = claim(engine, [first.job_id])
    assert second.exact


def test_a_job_claimed_by_an_inexact_head_is_never_exact_again(engine: Engine) -> None:
    with engine.begin() as connection:
        pipelines.ready(connection, "p", 1, seats=4, stages=[], exact=False, kv_tokens=64)
    assert not running(engine).exact


def test_a_job_that_asks_for_exact_rows_waits_for_them_and_then_for_the_same_ones(
    engine: Engine,
) -> None:
    (wants,) = submit(engine, exact=True)
    with engine.begin() as connection:
        pipelines.ready(connection, "p", 1, seats=4, stages=[], exact=False, kv_tokens=64)
    assert claim(engine, [wants], exact_wait_s=0.0) == []
    with engine.begin() as connection:
        assert claims.postpone_unfit(connection, [wants], HEAD, wait_s=60) == {wants}
        pipelines.ready(connection, "p", 1, seats=4, stages=[], exact=True, kv_tokens=64)
        assert claims.postpone_unfit(connection, [wants], HEAD, wait_s=60) == set()
    change(engine, "UPDATE jobs SET not_before = now()")
    (first,) = claim(engine, [wants])
    release(engine, first)

    assert claim(engine, [wants], head=replace(HEAD, exactness="y"), exact_wait_s=0.0) == []
    with engine.begin() as connection:
        assert claims.postpone_unfit(
            connection, [wants], replace(HEAD, exactness="y"), wait_s=60
        ) == {wants}
    change(engine, "UPDATE jobs SET not_before = now()")
    (second,) = claim(engine, [wants])
    assert second.exact


def test_a_job_is_exact_while_its_adapter_has_the_same_fingerprint(engine: Engine) -> None:
    # Given a job that a head began with an adapter
    (job_id,) = submit(engine, adapter="legal")
    first, other = (replace(HEAD, adapters={"legal": each, "medical": "9"}) for each in "12")
    (claimed,) = claim(engine, [job_id], head=first)
    assert release(engine, claimed)

    # When a head with other files may wait, it leaves the job alone; one with the same files takes
    # it
    assert claim(engine, [job_id], head=other) == []
    (again,) = claim(engine, [job_id], head=first)
    assert again.exact
    assert release(engine, again)

    # Then it is exact no more once the other one takes it
    (taken,) = claim(engine, [job_id], head=other, exact_wait_s=0.0)
    assert not taken.exact
    assert taken.params.adapter == "legal"


def test_an_adapter_that_the_head_does_not_know_yet_is_another_one_each_time(
    engine: Engine,
) -> None:
    (job_id,) = submit(engine, adapter="legal")
    (claimed,) = claim(engine, [job_id])
    assert claimed.exact
    assert claimed.adapter is None
    assert release(engine, claimed)

    (again,) = claim(engine, [job_id], exact_wait_s=0.0)

    assert not again.exact
