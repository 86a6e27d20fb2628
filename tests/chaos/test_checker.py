"""The judge itself: each violation, written into real tables by hand, must be found; an honest life
must pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.chaos.judge.bits import retracted, unequal
from tests.chaos.judge.checker import judge
from tests.chaos.load.journal import Asked, Watched
from tests.chaos.load.undisturbed import Expected
from tests.chaos.report.finding import Finding

TOKENS = (11, 12, 13, 14)
TEXT = "word"
LOGPROBS = [[token, -0.5, [[token, -0.5], [7, -1.25]]] for token in TOKENS]
EXPECTED = [Expected(tokens=TOKENS, text=TEXT, logprobs=LOGPROBS)]

JOB = """
INSERT INTO jobs (id, model, prompt, metadata, prompt_ids, max_tokens, prepared_at, state, fence,
    lease_until, finished_at)
VALUES (%(id)s, 'clerk', 'sort: 0, 7, 30, 12 =', '{"asked_by": "chaos"}', '{1}', 4, now(),
    %(state)s, 2,
    CASE WHEN %(state)s = 'running' THEN now() END,
    CASE WHEN %(state)s NOT IN ('queued', 'running') THEN now() END)
"""
ATTEMPT = """
INSERT INTO attempts (job_id, fence, pipeline, epoch, worker, fingerprint, exactness, num_resumed,
    tokens, logprobs, outcome, heartbeat_at, ended_at)
VALUES (%s, %s, 'p', 1, 'w', 'f', 'e', %s, %s, %s, %s, now() - interval '1 s', now())
"""
RESULT = """
INSERT INTO results (job_id, fence, text, token_ids, logprobs, prompt_tokens, completion_tokens,
    finish_reason, exact)
VALUES (%s, 2, %s, %s, %s, 1, 4, 'length', true)
"""


@pytest.fixture
def job_id(database_url: str) -> UUID:
    """A job that was lost once after two tokens, resumed, and succeeded."""
    job_id = uuid4()
    with psycopg.connect(database_url) as connection:
        connection.execute(JOB, {"id": job_id, "state": "succeeded"})
        connection.execute(ATTEMPT, (job_id, 1, 0, list(TOKENS[:2]), Jsonb(LOGPROBS[:2]), "lost"))
        connection.execute(ATTEMPT, (job_id, 2, 2, list(TOKENS), Jsonb(LOGPROBS), "succeeded"))
        connection.execute(RESULT, (job_id, TEXT, list(TOKENS), Jsonb(LOGPROBS)))
    return job_id


def found(database_url: str, job_id: UUID, *watched: Watched) -> list[tuple[str, str]]:
    """Invariant and count of each finding, once."""
    return kinds(
        judge(
            database_url, [Asked(id=job_id, number=0, door="sql", promised=True)], watched, EXPECTED
        )
    )


def kinds(findings: Sequence[Finding]) -> list[tuple[str, str]]:
    return sorted({(finding.invariant, finding.count) for finding in findings})


def read(job_id: UUID, *tokens: int) -> Watched:
    """A reader that saw these tokens and the end."""
    return Watched(
        job_id=job_id,
        tokens=list(tokens),
        text=TEXT,
        logprobs=LOGPROBS[: len(tokens)],
        end_state="succeeded",
        end_tokens=list(TOKENS),
    )


def test_an_honest_life_is_no_finding(database_url: str, job_id: UUID) -> None:
    assert found(database_url, job_id, read(job_id, *TOKENS)) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param("DELETE FROM jobs WHERE id = %s", ("I1", "lost"), id="a lost job"),
        pytest.param(
            "UPDATE jobs SET state = 'running', lease_until = now(), finished_at = NULL"
            " WHERE id = %s",
            ("I1", "lost"),
            id="a stuck job",
        ),
        pytest.param(
            "UPDATE jobs SET state = 'failed' WHERE id = %s",
            ("I1", "lost"),
            id="an end nobody asked for",
        ),
        pytest.param(
            "UPDATE jobs SET state = 'failed', error = '{\"code\": \"crashed\"}' WHERE id = %s",
            ("I1", "exhausted"),
            id="an innocent job whose heads died too often",
        ),
        pytest.param("DELETE FROM results WHERE job_id = %s", ("I1", "lost"), id="a lost result"),
        pytest.param(
            "INSERT INTO results SELECT * FROM results WHERE job_id = %s",
            ("I2", "duplicated"),
            id="a second result",
        ),
        pytest.param(
            "UPDATE attempts SET outcome = 'succeeded' WHERE job_id = %s",
            ("I2", "duplicated"),
            id="a second end",
        ),
        pytest.param(
            "UPDATE results SET token_ids[3] = 99 WHERE job_id = %s",
            ("I2", "token_mismatches"),
            id="a changed token",
        ),
        pytest.param(
            "UPDATE results SET text = 'ward' WHERE job_id = %s",
            ("I2", "text_mismatches"),
            id="a changed text",
        ),
        pytest.param(
            f"UPDATE results SET logprobs = jsonb_set(logprobs, '{{1,1}}', '{-0.5 + 2**-30}')"
            " WHERE job_id = %s",
            ("I2", "logprob_mismatches"),
            id="a log-probability that is another in its last bits",
        ),
        pytest.param(
            "UPDATE results SET logprobs = jsonb_set(logprobs, '{0,2,1,0}', '8') WHERE job_id = %s",
            ("I2", "logprob_mismatches"),
            id="another alternative",
        ),
        pytest.param(
            "UPDATE results SET logprobs = NULL WHERE job_id = %s",
            ("I2", "logprob_mismatches"),
            id="lost log-probabilities",
        ),
        pytest.param(
            "UPDATE attempts SET logprobs = jsonb_set(logprobs, '{0,1}', '-0.75')"
            " WHERE job_id = %s AND fence = 1",
            ("I2", "logprob_mismatches"),
            id="a changed log-probability in a checkpoint",
        ),
        pytest.param(
            "UPDATE attempts SET tokens[2] = 99 WHERE job_id = %s AND fence = 1",
            ("I2", "token_mismatches"),
            id="a changed checkpoint",
        ),
        pytest.param(
            """UPDATE results SET provenance = '{"adapter": {"fingerprint": "f"}}'"""
            " WHERE job_id = %s",
            ("I2", "adapter_mismatches"),
            id="an adapter that nobody asked for",
        ),
        pytest.param(
            "UPDATE results SET fence = 1 WHERE job_id = %s",
            ("I3", "stale_commits"),
            id="a result of a stale fence",
        ),
        pytest.param(
            "UPDATE attempts SET tokens = '{11, 12, 13}' WHERE job_id = %s AND fence = 1",
            ("I3", "stale_commits"),
            id="a checkpoint after the next claim",
        ),
        pytest.param(
            "UPDATE attempts SET heartbeat_at = now() + interval '1 min'"
            " WHERE job_id = %s AND fence = 1",
            ("I3", "stale_commits"),
            id="a heartbeat after the end",
        ),
        pytest.param(
            "UPDATE jobs SET fence = 3 WHERE id = %s",
            ("I3", "stale_commits"),
            id="a fence that no attempt has",
        ),
        pytest.param(
            "UPDATE attempts SET outcome = 'crashed' WHERE job_id = %s AND fence = 1",
            ("I1", "blamed"),
            id="a crash in spite of new tokens",
        ),
    ],
)
def test_a_violation_in_the_rows_is_found(
    database_url: str, job_id: UUID, change: str, expected: tuple[str, str]
) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute("ALTER TABLE results DROP CONSTRAINT results_pkey")
        # The judge trusts nothing that keeps rows from such changes.
        connection.execute("ALTER TABLE jobs DISABLE TRIGGER shardline_ends_are_final")
        connection.execute(change, (job_id,))
    assert expected in found(database_url, job_id)


def test_a_job_is_held_to_its_own_result_without_an_undisturbed_run(
    database_url: str, job_id: UUID
) -> None:
    asked = [Asked(id=job_id, number=0, door="sql", promised=True)]
    stream = read(job_id, *TOKENS)
    assert judge(database_url, asked, [stream], None) == []
    with psycopg.connect(database_url) as connection:
        connection.execute("UPDATE results SET token_ids[1] = 99 WHERE job_id = %s", (job_id,))
    assert {"token_mismatches", "retracted"} == {
        one.count for one in judge(database_url, asked, [stream], None)
    }


def exact(tokens: Sequence[int], *, exactness: str = "a", is_exact: bool = True) -> dict[str, Any]:
    return {
        "id": uuid4(),
        "state": "succeeded",
        "exact": is_exact,
        "exactness": exactness,
        "token_ids": list(tokens),
        "text": TEXT,
        "logprobs": None,
        "embedding": None,
        "score": None,
    }


@pytest.mark.parametrize(
    ("number", "row", "counts"),
    [
        pytest.param(0, exact(TOKENS), [], id="the same tokens"),
        pytest.param(0, exact(TOKENS[::-1]), ["token_mismatches"], id="other tokens"),
        pytest.param(
            0,
            {**exact(TOKENS), "logprobs": LOGPROBS},
            ["logprob_mismatches"],
            id="other log-probabilities",
        ),
        pytest.param(
            0, {**exact(TOKENS), "embedding": [0.5]}, ["vector_mismatches"], id="another vector"
        ),
        pytest.param(1, exact(TOKENS[::-1]), [], id="another request"),
        pytest.param(0, exact(TOKENS[::-1], exactness="b"), [], id="another exactness"),
        pytest.param(0, exact(TOKENS[::-1], is_exact=False), [], id="it does not say exact"),
    ],
)
def test_equal_requests_of_one_exactness_must_have_equal_results(
    number: int, row: dict[str, Any], counts: list[str]
) -> None:
    assert [finding.count for finding in unequal([(0, exact(TOKENS)), (number, row)])] == counts


def test_a_stream_of_a_job_that_moved_to_another_exactness_is_not_compared(
    database_url: str, job_id: UUID
) -> None:
    asked = [Asked(id=job_id, number=0, door="sql", promised=True)]
    stream = read(job_id, 11, 12, 99, 14)
    assert judge(database_url, asked, [stream], None) != []
    with psycopg.connect(database_url) as connection:
        connection.execute(
            "UPDATE attempts SET exactness = 'other' WHERE job_id = %s AND fence = 1", (job_id,)
        )
    assert judge(database_url, asked, [stream], None) == []


def test_a_job_of_an_unknown_id_is_a_duplicate(database_url: str, job_id: UUID) -> None:
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
def test_a_stream_unlike_the_result_is_retracted(
    database_url: str, job_id: UUID, tokens: tuple[int, ...]
) -> None:
    assert found(database_url, job_id, read(job_id, *tokens)) == [("I9", "retracted")]


@pytest.mark.parametrize("text", ["wor", "woord", "wo\ufffdrd", ""])
def test_joined_stream_text_unlike_the_result_is_counted(
    database_url: str, job_id: UUID, text: str
) -> None:
    watched = read(job_id, *TOKENS)
    watched.text = text
    watched.num_joins = 2
    assert found(database_url, job_id, watched) == [("I9", "text_mismatches")]


def test_a_stream_left_early_may_hold_the_beginning_of_the_text(
    database_url: str, job_id: UUID
) -> None:
    left = Watched(job_id=job_id, tokens=list(TOKENS[:2]), text="wo", logprobs=LOGPROBS[:2])
    assert found(database_url, job_id, left) == []
    left.text = "wa"
    assert found(database_url, job_id, left) == [("I9", "text_mismatches")]


def test_a_streamed_log_probability_unlike_the_result_is_counted(
    database_url: str, job_id: UUID
) -> None:
    watched = read(job_id, *TOKENS)
    watched.logprobs = [*LOGPROBS[:3], [TOKENS[3], -0.25, []]]
    assert found(database_url, job_id, watched) == [("I9", "logprob_mismatches")]


def test_a_stream_with_a_gap_is_retracted(database_url: str, job_id: UUID) -> None:
    watched = read(job_id, *TOKENS)
    watched.gaps.append("an event starts at 3, 2 tokens were there")
    assert found(database_url, job_id, watched) == [("I9", "retracted")]


@pytest.mark.parametrize(("hears_partials", "counts"), [(False, []), (True, ["retracted"])])
def test_a_cancelled_job_without_result_is_wrong_only_where_partials_are_given(
    job_id: UUID, *, hears_partials: bool, counts: list[str]
) -> None:
    """A stream may have told more than was saved: a reader in Python, who hears no partial result,
    cannot know."""
    watched = Watched(
        job_id=job_id, tokens=list(TOKENS), end_state="cancelled", hears_partials=hears_partials
    )
    row = {
        "state": "cancelled",
        "token_ids": list(TOKENS[:2]),
        "text": TEXT[:2],
        "logprobs": None,
        "embedding": None,
        "score": None,
        "exact": True,
    }

    findings = retracted([watched], {job_id: row}, {job_id: EXPECTED[0]})

    assert [finding.count for finding in findings] == counts
