"""The judge of choices finds what is torn, doubled or drawn twice."""

from __future__ import annotations

from uuid import UUID, uuid4

import psycopg
import pytest

from tests.chaos.judge.choices import torn_choices
from tests.chaos.load.chooser import MARK

INSERT = """
INSERT INTO jobs (model, prompt, choice_of, choice_index, seed, metadata)
VALUES ('m', 'text', %s, %s, %s, jsonb_build_object('asked_by', %s::text, 'n', %s::int))
"""


def insert(database_url: str, first: UUID | None, n: int, rows: dict[int | None, int]) -> None:
    """Rows by their places, with their seeds."""
    with psycopg.connect(database_url) as connection:
        for place, seed in rows.items():
            connection.execute(INSERT, (first, place, seed, MARK, n))


def test_whole_groups_are_no_finding(database_url: str) -> None:
    insert(database_url, uuid4(), 3, {0: 5, 1: 6, 2: 7})
    insert(database_url, None, 1, {None: 5})
    assert torn_choices(database_url) == []


@pytest.mark.parametrize("rows", [{0: 5, 1: 6}, {0: 5, 2: 6, 1: 5}, {1: 1, 2: 2, 3: 3}])
def test_a_torn_group_is_one(database_url: str, rows: dict[int | None, int]) -> None:
    insert(database_url, uuid4(), 3, rows)
    assert [finding.count for finding in torn_choices(database_url)] == ["lost"]


def test_a_row_alone_that_should_have_others_is_one(database_url: str) -> None:
    insert(database_url, None, 2, {None: 5})
    assert len(torn_choices(database_url)) == 1
