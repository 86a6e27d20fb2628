"""The judge itself: each violation, written into real tables by hand, must be found; an honest life must pass."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID, uuid4

import psycopg
import pytest

from tests.faults.checker import Finding, judge
from tests.faults.journal import Asked, Watched

TOKENS = (11, 12, 13, 14)
EXPECTED = [TOKENS]

JOB = """
INSERT INTO jobs (id, model, prompt, prompt_ids, max_tokens, prepared_at, state, fence, lease_until, finished_at)
VALUES (%(id)s, 'clerk', 'sort: 0, 7, 30, 12 =', '{1}', 4, now(), %(state)s, 2,
    CASE WHEN %(state)s = 'running' THEN now() END,
    CASE WHEN %(state)s NOT IN ('queued', 'running') THEN now() END)
"""
ATTEMPT = """
INSERT INTO attempts (job_id, fence, pipeline, epoch, worker, fingerprint, exactness, num_resumed, tokens, outcome,
    heartbeat_at, ended_at)
VALUES (%s, %s, 'p', 1, 'w', 'f', 'e', %s, %s, %s, now() - interval '1 s', now())
"""
RESULT = """
INSERT INTO results (job_id, fence, text, token_ids, prompt_tokens, completion_tokens, finish_reason, exact)
VALUES (%s, 2, '', %s, 1, 4, 'length', true)
"""


@pytest.fixture
def job_id(database_url: str) -> UUID:
    """A job that was lost once after two tokens, resumed, and succeeded."""
    job_id = uuid4()
    with psycopg.connect(database_url) as connection:
        connection.execute(JOB, {"id": job_id, "state": "succeeded"})
        connection.execute(ATTEMPT, (job_id, 1, 0, list(TOKENS[:2]), "lost"))
        connection.execute(ATTEMPT, (job_id, 2, 2, list(TOKENS), "succeeded"))
        connection.execute(RESULT, (job_id, list(TOKENS)))
    return job_id


def found(database_url: str, job_id: UUID, *watched: Watched) -> list[tuple[str, str]]:
    """Invariant and count of each finding, once."""
    return kinds(judge(database_url, [Asked(id=job_id, number=0, door="sql", promised=True)], watched, EXPECTED))


def kinds(findings: Sequence[Finding]) -> list[tuple[str, str]]:
    return sorted({(finding.invariant, finding.count) for finding in findings})


def read(job_id: UUID, *tokens: int) -> Watched:
    """A reader that saw these tokens and the end."""
    return Watched(job_id=job_id, tokens=list(tokens), end_state="succeeded", end_tokens=list(TOKENS))


def test_given_an_honest_life_when_judged_then_nothing_is_found(database_url: str, job_id: UUID) -> None:
    assert found(database_url, job_id, read(job_id, *TOKENS)) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param("DELETE FROM jobs WHERE id = %s", ("I1", "lost"), id="a lost job"),
        pytest.param(
            "UPDATE jobs SET state = 'running', lease_until = now(), finished_at = NULL WHERE id = %s",
            ("I1", "lost"),
            id="a stuck job",
        ),
        pytest.param("UPDATE jobs SET state = 'failed' WHERE id = %s", ("I1", "lost"), id="an end nobody asked for"),
        pytest.param("DELETE FROM results WHERE job_id = %s", ("I1", "lost"), id="a lost result"),
        pytest.param(
            "INSERT INTO results SELECT * FROM results WHERE job_id = %s", ("I2", "duplicated"), id="a second result"
        ),
        pytest.param(
            "UPDATE attempts SET outcome = 'succeeded' WHERE job_id = %s", ("I2", "duplicated"), id="a second end"
        ),
        pytest.param(
            "UPDATE results SET token_ids[3] = 99 WHERE job_id = %s", ("I2", "token_mismatches"), id="a changed token"
        ),
        pytest.param(
            "UPDATE attempts SET tokens[2] = 99 WHERE job_id = %s AND fence = 1",
            ("I2", "token_mismatches"),
            id="a changed checkpoint",
        ),
        pytest.param(
            "UPDATE results SET fence = 1 WHERE job_id = %s", ("I3", "stale_commits"), id="a result of a stale fence"
        ),
        pytest.param(
            "UPDATE attempts SET tokens = '{11, 12, 13}' WHERE job_id = %s AND fence = 1",
            ("I3", "stale_commits"),
            id="a checkpoint after the next claim",
        ),
        pytest.param(
            "UPDATE attempts SET heartbeat_at = now() + interval '1 min' WHERE job_id = %s AND fence = 1",
            ("I3", "stale_commits"),
            id="a heartbeat after the end",
        ),
        pytest.param(
            "UPDATE jobs SET fence = 3 WHERE id = %s", ("I3", "stale_commits"), id="a fence that no attempt has"
        ),
        pytest.param(
            "UPDATE attempts SET outcome = 'crashed' WHERE job_id = %s AND fence = 1",
            ("I1", "blamed"),
            id="a crash in spite of new tokens",
        ),
    ],
)
def test_given_a_violation_in_the_rows_when_judged_then_it_is_found(
    database_url: str, job_id: UUID, change: str, expected: tuple[str, str]
) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute("ALTER TABLE results DROP CONSTRAINT results_pkey")
        connection.execute(change, (job_id,))
    assert expected in found(database_url, job_id)


def test_given_no_undisturbed_run_when_judged_then_a_job_is_held_to_its_own_result(
    database_url: str, job_id: UUID
) -> None:
    asked, stream = [Asked(id=job_id, number=0, door="sql", promised=True)], read(job_id, *TOKENS)
    assert judge(database_url, asked, [stream], None) == []
    with psycopg.connect(database_url) as connection:
        connection.execute("UPDATE results SET token_ids[1] = 99 WHERE job_id = %s", (job_id,))
    assert {"token_mismatches", "retracted"} == {one.count for one in judge(database_url, asked, [stream], None)}


def test_given_a_job_of_an_unknown_id_when_judged_then_it_is_a_duplicate(database_url: str, job_id: UUID) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute(JOB, {"id": uuid4(), "state": "queued"})
    assert found(database_url, job_id) == [("I2", "duplicated")]


@pytest.mark.parametrize(
    "tokens",
    [
        pytest.param((11, 12, 99, 14), id="another token than the result's"),
        pytest.param((11, 12), id="a stream that ended early"),
        pytest.param((11, 12, 13, 14, 14), id="a token too many"),
    ],
)
def test_given_a_stream_unlike_the_result_when_judged_then_it_is_retracted(
    database_url: str, job_id: UUID, tokens: tuple[int, ...]
) -> None:
    assert found(database_url, job_id, read(job_id, *tokens)) == [("I9", "retracted")]


def test_given_a_stream_with_a_gap_when_judged_then_it_is_retracted(database_url: str, job_id: UUID) -> None:
    watched = read(job_id, *TOKENS)
    watched.gaps.append("an event starts at 3, 2 tokens were there")
    assert found(database_url, job_id, watched) == [("I9", "retracted")]
