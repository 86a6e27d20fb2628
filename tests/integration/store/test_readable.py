"""A head meets rows of a later release, or rows changed by hand, on a real Postgres: it lives, and
runs the others."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine, text

from shardline.contract.job import JobState
from shardline.store import jobs
from shardline_server.store import outbox, windows
from tests.integration.rows import cell, change, claim, pass_time, submit

SET_PARAMS = (
    "UPDATE jobs SET params = CAST(:params AS jsonb), sent_at = now(), num_sends = 1 WHERE id = :id"
)


def row(engine: Engine, query: str, **values: Any) -> tuple[Any, ...]:
    """The one row that a query gives."""
    with engine.begin() as connection:
        return tuple(connection.execute(text(query), values).one())


def test_a_job_with_a_later_releases_parameter_waits_and_others_run(engine: Engine) -> None:
    newer, known = submit(engine, 2)
    change(engine, SET_PARAMS, id=newer, params='{"temperature": 0.5, "grammar": "json"}')

    assert [one.job_id for one in claim(engine, [newer, known])] == [known]
    what_is_left = (
        "SELECT state, fence, crashes, sent_at IS NULL, not_before > now(), params ? 'grammar'"
        " FROM jobs"
    )
    assert row(engine, f"{what_is_left} WHERE id = :id", id=newer) == (
        "queued",
        0,
        0,
        True,
        True,
        True,
    )
    with engine.begin() as connection:
        assert [send.job_id for send in outbox.stamp_due(connection, resend_s=1.0)] == []
        job = jobs.get_job(connection, newer)
    assert job is not None
    assert job.params.temperature == 0.5


def test_a_job_for_a_newer_head_is_sent_when_due_and_runs_there(engine: Engine) -> None:
    (newer,) = submit(engine)
    change(engine, SET_PARAMS, id=newer, params='{"grammar": "json"}')
    assert claim(engine, [newer]) == []
    with engine.begin() as connection:
        pass_time(connection, newer, "not_before")
        assert [send.job_id for send in outbox.stamp_due(connection, resend_s=1.0)] == [newer]
    # The newer head knows the parameter.
    change(engine, "UPDATE jobs SET params = '{}'")
    assert [one.job_id for one in claim(engine, [newer])] == [newer]


def test_rows_for_newer_heads_that_fill_the_window_let_later_jobs_pass(engine: Engine) -> None:
    newer = submit(engine, windows.WINDOW_MIN)
    change(engine, """UPDATE jobs SET params = '{"grammar": "json"}'""")
    (known,) = submit(engine)
    with engine.begin() as connection:
        assert {send.job_id for send in outbox.stamp_due(connection, resend_s=1.0)} == set(newer)
    assert claim(engine, newer) == []
    with engine.begin() as connection:
        assert [send.job_id for send in outbox.stamp_due(connection, resend_s=1.0)] == [known]


@pytest.mark.parametrize("params", ['{"top_p": "much"}', '{"temperature": 7}'])
def test_a_job_with_a_parameter_changed_by_hand_fails_alone_with_a_reason(
    engine: Engine, params: str
) -> None:
    broken, known = submit(engine, 2)
    change(engine, SET_PARAMS, id=broken, params=params)
    assert [one.job_id for one in claim(engine, [broken, known])] == [known]
    assert cell(engine, "SELECT state FROM jobs WHERE id = :id", id=broken) == JobState.FAILED
    field = cell(engine, "SELECT error ->> 'field' FROM jobs WHERE id = :id", id=broken)
    assert f'"{field}"' in params
