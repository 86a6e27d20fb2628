"""Whether the choices of a request are rows all together, once each. Plain SQL: knows nothing of
the product's code, only its tables."""

from __future__ import annotations

import psycopg

from tests.chaos.load.chooser import MARK
from tests.chaos.report.finding import Finding

# Of each request: how many choices it asked for, and the places of those that are there. Without a
# group a row stands for itself, in the first place.
GROUPS = """
SELECT coalesce(choice_of, id), max((metadata ->> 'n')::int),
    array_agg(coalesce(choice_index, 0)::int ORDER BY choice_index), count(DISTINCT seed)
FROM jobs WHERE metadata ->> 'asked_by' = %s GROUP BY 1
"""


def torn_choices(database_url: str) -> list[Finding]:
    """I2: a request of which some choices are there and others not, or two in one place, or two
    with one seed."""
    with psycopg.connect(database_url) as connection:
        groups = connection.execute(GROUPS, (MARK,)).fetchall()
    return [
        Finding(
            invariant="I2",
            count="lost",
            what=f"{n} choices were asked for: there are {places}, with {num_seeds} seeds",
            job_id=first,
        )
        for first, n, places, num_seeds in groups
        if places != list(range(n)) or num_seeds != n
    ]
