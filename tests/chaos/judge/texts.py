"""Whether the vectors and scores of requests with several texts are those of the undisturbed pass,
at the door and in rows, once each. Plain SQL: knows nothing of the product's code, only its
tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import psycopg

from tests.chaos.judge.bits import vector_of
from tests.chaos.load.encoders.embedder import MARK
from tests.chaos.load.journal import TextsHeard
from tests.chaos.load.undisturbed import Expected
from tests.chaos.report.finding import Finding

ROWS = """
SELECT coalesce(choice_of, jobs.id), coalesce(choice_index, 0)::int, metadata -> 'numbers', state,
    embedding, score
FROM jobs LEFT JOIN results ON results.job_id = jobs.id WHERE metadata ->> 'asked_by' = %s
ORDER BY 1, 2
"""


def torn_texts(
    database_url: str, heard: Sequence[TextsHeard], expected: Sequence[Expected] | None
) -> list[Finding]:
    """I2: a request of which a text has no row or two, or a vector with other bits."""
    found = []
    groups = defaultdict(list)
    with psycopg.connect(database_url) as connection:
        for first, place, numbers, state, embedding, score in connection.execute(ROWS, (MARK,)):
            groups[first].append((place, numbers, state, vector_of(embedding, score)))
    for first, rows in groups.items():
        numbers = rows[0][1]
        places = [place for place, *_ in rows]
        if places != list(range(len(numbers))) or {row[2] for row in rows} != {"succeeded"}:
            states = sorted({row[2] for row in rows})
            what = f"{len(numbers)} texts were asked for: rows {places} are {states}"
            found.append(Finding(invariant="I2", count="lost", what=what, job_id=first))
        elif expected is not None:
            wanted = [expected[number].vector for number in numbers]
            if [row[3] for row in rows] != wanted:
                found.append(_other("its rows have other vectors than the undisturbed pass"))
    for one in heard:
        vectors = [vector_of(each, None) if len(each) > 1 else tuple(each) for each in one.vectors]
        if expected is not None and vectors != [expected[number].vector for number in one.numbers]:
            found.append(_other(f"a door answered requests {one.numbers} with other vectors"))
    return found


def _other(what: str) -> Finding:
    return Finding(invariant="I2", count="vector_mismatches", what=what)
