"""Whether the numbered events of responses are those of one sequence, whoever read them and how
often. Knows no gateway."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import dict_row

from tests.chaos.load.journal import EventHeard, ResponseHeard
from tests.chaos.report.finding import Finding

# A job that went on under another exactness may say something else to who joins again.
ROWS = """
SELECT jobs.id, state, text, tool_calls, finish_reason,
    jobs.params -> 'tools' IS NOT NULL AS has_tools,
    (SELECT count(DISTINCT exactness) > 1 FROM attempts WHERE job_id = jobs.id) AS has_moved
FROM jobs LEFT JOIN results ON results.job_id = jobs.id WHERE jobs.id = ANY(%s)
"""


def torn_responses(database_url: str, heard: Sequence[ResponseHeard]) -> list[Finding]:
    """I9: an event number that is missing, came twice or means something else when it is read
    again; a text that is not the row's."""
    with psycopg.connect(database_url, row_factory=dict_row) as connection:
        ids = [one.job_id for one in heard]
        rows = {row["id"]: row for row in connection.execute(ROWS, (ids,))}
    return [
        finding
        for one in heard
        if one.job_id in rows and not rows[one.job_id]["has_moved"]
        for finding in _torn(one, rows[one.job_id])
    ]


def _torn(heard: ResponseHeard, row: Mapping[str, Any]) -> Iterator[Finding]:
    if heard.is_diverged:
        yield _found("retracted", "its stream diverged", heard.job_id)
    for events in (heard.events, heard.again or ()):
        if (problem := problem_of(events)) is not None:
            yield _found("retracted", f"{problem}, in {heard.num_joins} connections", heard.job_id)
    if heard.again is not None and heard.again != heard.events:
        pairs = zip(heard.events, heard.again, strict=False)
        first = next((one.number for one, other in pairs if one != other), len(heard.events))
        what = f"its events differ from number {first} when they are read again"
        yield _found("retracted", what, heard.job_id)
    if heard.document is None or row["state"] != "succeeded":
        return
    told = "".join(event.text for event in heard.events)
    if row["has_tools"]:
        wanted = "".join(call["function"]["arguments"] for call in row["tool_calls"] or ())
    else:
        wanted = row["text"]
    # The limit of tokens may cut the last call, which the row has not then.
    if told != wanted and not (row["has_tools"] and row["finish_reason"] == "length"):
        yield _found("text_mismatches", f"its events say {told!r}, not {wanted!r}", heard.job_id)


def problem_of(events: Sequence[EventHeard]) -> str | None:
    """What is wrong with their numbers; None: nothing."""
    for place, event in enumerate(events):
        if event.number != place:
            how = "came twice" if event.number < place else f"came in place of {place}"
            return f"event {event.number} {how}"
    return None


def _found(count: str, what: str, job_id: UUID) -> Finding:
    return Finding(invariant="I9", count=count, what=what, job_id=job_id)
