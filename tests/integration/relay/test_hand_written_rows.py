"""Rows of SQL that hold what Python does not: each ends alone with its reason, and every reader
reads the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import IntegrityError

from shardline.contract.job import Job, JobState
from shardline.store import jobs, listing, models
from shardline.store.listing import PageEnd
from tests.integration.relay.relay_stack import words_tokenizer
from tests.integration.relay.test_preparer import preparer
from tests.integration.rows import MODEL, cell, claim, database_with_head, model_row

DIGITS = "1" * 5_000


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    with database_with_head(database_url) as engine:
        with engine.begin() as connection:
            models.register_model(connection, {**model_row(MODEL), "tokenizer": words_tokenizer()})
        yield engine


def write(engine: Engine, **columns: str) -> UUID:
    """A row as a hand writes it: SQL for each column."""
    values = {"model": f"'{MODEL}'", "prompt": "'one two'", **columns}
    statement = (
        f"INSERT INTO jobs ({', '.join(values)}) VALUES ({', '.join(values.values())}) RETURNING id"
    )
    with engine.begin() as connection:
        return UUID(str(connection.scalar(text(statement))))


def read(engine: Engine, job_id: UUID) -> Job:
    with engine.begin() as connection:
        job = jobs.get_job(connection, job_id)
    assert job is not None
    return job


@pytest.mark.parametrize(
    ("columns", "field"),
    [
        ({"params": """'{"a": 1e5000}'"""}, "a"),
        ({"params": """'{"top_k": 1e5000}'"""}, "top_k"),
        ({"retry": """'{"max_attempts": 1e5000}'"""}, "retry.max_attempts"),
        ({"retry": """'{"max_attempts": 2, "on": ["lost"]}'"""}, "retry.on[0]"),
        ({"params": """'{"temperature": 1.5e400}'"""}, "temperature"),
        ({"params": """'{"seed": 18446744073709551616}'"""}, "seed"),
        ({"params": """'{"repetition_penalty": 1e-40}'"""}, "repetition_penalty"),
        (
            {"params": """('{"stop": ' || repeat('[', 3000) || repeat(']', 3000) || '}')::jsonb"""},
            "params",
        ),
        ({"prompt": "NULL", "messages": f"'[{DIGITS}]'"}, "messages[0]"),
        ({"metadata": "jsonb_build_object('a', repeat('x', 100000))"}, "metadata"),
        ({"metadata": "jsonb_build_object('a', repeat('x', 10000000))"}, "metadata"),
        ({"metadata": "(repeat('{\"a\":', 40) || '1' || repeat('}', 40))::jsonb"}, "metadata"),
    ],
)
def test_a_row_that_cannot_run_ends_with_its_reason_and_holds_up_nobody(
    engine: Engine, columns: dict[str, Any], field: str
) -> None:
    wrong = write(engine, **columns)
    good = write(engine)

    preparer(engine).turn()

    job = read(engine, wrong)
    assert (job.state, (job.error or {})["field"]) == (JobState.FAILED, field)
    assert cell(engine, "SELECT prepared_at IS NOT NULL FROM jobs WHERE id = :id", id=good)
    assert [one.job_id for one in claim(engine, [wrong, good])] == [good]


def test_neutral_values_of_other_servers_run(engine: Engine) -> None:
    job_id = write(
        engine,
        params="""'{"seed": -1, "top_p": 0, "top_k": -1, "max_tokens": 5.0, "logprobs": null}'""",
    )

    preparer(engine).turn()

    (claimed,) = claim(engine, [job_id])
    assert (claimed.params.top_k, claimed.params.max_tokens, claimed.params.seed) == (0, 5, None)
    assert 0 < claimed.params.top_p < 1e-6
    assert claimed.seed >= 0


def test_times_and_numbers_that_python_has_not_are_shown_to_readers(engine: Engine) -> None:
    strange = write(
        engine,
        not_before="'infinity'",
        deadline_at="'infinity'",
        metadata="""'{"a": 1e5000, "b": 1.5e400}'""",
    )
    old = write(engine, created_at="'1970-01-02'", not_before="'-infinity'")
    late = write(engine, created_at="'9998-01-02'", not_before="'20000-01-01'")

    with engine.begin() as connection:
        listed = [job.id for job in listing.list_jobs(connection, limit=1)]
        while (
            end := PageEnd.of(listing.list_jobs(connection, limit=1, after=listed[-1]))
        ) is not None:
            parsed = PageEnd.parse(str(end))
            assert parsed is not None
            listed.append(parsed.job_id)

    assert listed == [late, strange, old]
    assert read(engine, strange).metadata == {"a": "1" + "0" * 5_000, "b": 15 * 10**399}
    assert read(engine, late).created_at.year == 9998


@pytest.mark.parametrize(
    "moment", ["infinity", "-infinity", "1969-12-31 00:00:00+00", "20000-01-01 00:00:00+00"]
)
def test_a_row_of_no_moment_is_refused_by_name(engine: Engine, moment: str) -> None:
    with pytest.raises(IntegrityError, match="created_at_is_between_1970_and_9999"):
        write(engine, created_at=f"'{moment}'")


@pytest.mark.parametrize("text_of", ["999999999999999999", "-999999999999999999"])
def test_the_end_of_a_page_beyond_all_years_is_none(text_of: str) -> None:
    assert PageEnd.parse(f"{text_of}-00000000-0000-0000-0000-000000000000") is None
