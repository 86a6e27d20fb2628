"""Whether what follows a Celery task followed the end of its job, once, with the completion. Knows
no relay.

I13: each callback is called once, errbacks of jobs that did not succeed too, and the result backend
has the result. Redis may lose messages that it holds, and notes of what was sent
(docs/guarantees.md): a job near a moment in which it did is not held to the number of its calls.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg
import redis
from celery import Celery
from celery.states import REVOKED, SUCCESS
from psycopg.rows import dict_row

from tests.chaos.judge.bits import vector_of
from tests.chaos.load.canvas import DOOR, ERRBACK, canvas_app, followers, kind_of
from tests.chaos.load.canvas_app import CALLS
from tests.chaos.load.journal import Asked
from tests.chaos.load.target import Target
from tests.chaos.report.finding import Finding
from tests.polling import within

SETTLE_S = 60.0
"""After the end: a relay that dies holds what follows for 20 s, and others work on it after."""
BEFORE_S = 10.0
"""A request is in Redis before it has a row."""

JOBS = """
SELECT id, state, extract(epoch FROM jobs.created_at)::float8 AS created_s, token_ids, text,
    embedding, score, choice,
    extract(epoch FROM finished_at)::float8 AS finished_s
FROM jobs LEFT JOIN results ON results.job_id = jobs.id
WHERE jobs.id = ANY(%s) AND finished_at IS NOT NULL
"""

Row = Mapping[str, Any]
Call = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """What came of all canvases."""

    findings: Sequence[Finding] = ()
    num_jobs: int = 0
    num_excused: int = 0
    """Of them, those near a moment in which Redis lost something."""


def followed(
    target: Target, disturbed_s: Sequence[float], *, patience_s: float = SETTLE_S
) -> Followed:
    """Waits until nothing is missing."""
    asked = [each for each in target.journal.everything() if each.door == DOOR]
    if target.results is None or not asked:
        return Followed()
    backend = target.results
    app = canvas_app(target.redis_url, target.results.url)
    last = Followed()

    def is_settled() -> bool:
        nonlocal last
        last = _judged(
            _rows(target.database_url, asked), asked, _calls(backend.url), disturbed_s, app
        )
        return not last.findings

    within(patience_s, is_settled, look_s=1.0)
    return last


def _judged(
    rows: Mapping[UUID, Row],
    asked: Sequence[Asked],
    calls: Mapping[UUID, Sequence[Call]],
    disturbed_s: Sequence[float],
    app: Celery,
) -> Followed:
    found: list[Finding] = []
    num_excused = 0
    for each in asked:
        row = rows.get(each.id)
        if row is None:
            continue
        is_excused = any(
            row["created_s"] - BEFORE_S <= at <= row["finished_s"] + SETTLE_S for at in disturbed_s
        )
        num_excused += is_excused
        wrong = [*_wrong_values(row, calls[each.id]), *_wrong_result(row, app)]
        if not is_excused:
            kind = kind_of(each.id, each.dress.fields)
            wrong += wrong_numbers(
                followers(kind, row["state"]), calls[each.id], is_whole=not each.num_unanswered
            )
        found += [
            Finding(invariant="I13", count="callbacks", what=what, job_id=each.id) for what in wrong
        ]
    return Followed(findings=found, num_jobs=len(rows), num_excused=num_excused)


def wrong_numbers(
    wanted: frozenset[str], calls: Sequence[Call], *, is_whole: bool = True
) -> Iterator[str]:
    """Calls that are missing, that came twice, or that nobody asked for. One that a broker has
    given twice is one. `is_whole` False: a part of the canvas may never have been sent."""
    firsts = Counter(call["name"] for call in calls if not call["again"])
    names = {call["name"] for call in calls}
    if is_whole:
        yield from (f"{name!r} was never called" for name in sorted(wanted - names))
    yield from (f"{name!r} was called without reason" for name in sorted(names - wanted))
    yield from (
        f"{name!r} was called {num} times" for name, num in sorted(firsts.items()) if num > 1
    )


def _wrong_values(row: Row, calls: Sequence[Call]) -> Iterator[str]:
    for call in calls:
        value = call["value"][0] if call["name"] == "body" else call["value"]
        if call["name"] == ERRBACK:
            is_right = value == str(row["id"])
        else:
            is_right = value["id"] == str(row["id"]) and _is_completion(row, value)
        if not is_right:
            yield f"{call['name']!r} was called with {str(value)[:200]}"


def _wrong_result(row: Row, app: Celery) -> Iterator[str]:
    stored = app.backend.get_task_meta(str(row["id"]))
    wanted = SUCCESS if row["state"] == "succeeded" else REVOKED
    if stored["status"] != wanted:
        yield f"the result backend says {stored['status']} of a job that is {row['state']}"
    elif wanted == SUCCESS and not _is_completion(row, stored["result"]):
        yield f"the result backend has {str(stored['result'])[:200]}"


def _is_completion(row: Row, value: Any) -> bool:
    if (value["token_ids"], value["text"]) != (row["token_ids"], row["text"]):
        return False
    if row["embedding"] is None and row["choice"] is not None:
        return True
    return vector_of(value.get("embedding"), value.get("score")) == vector_of(
        row["embedding"], row["score"]
    )


def _rows(database_url: str, asked: Sequence[Asked]) -> dict[UUID, Row]:
    with psycopg.connect(database_url, row_factory=dict_row) as connection:
        return {row["id"]: row for row in connection.execute(JOBS, ([each.id for each in asked],))}


def _calls(backend_url: str) -> Mapping[UUID, Sequence[Call]]:
    calls: defaultdict[UUID, list[Call]] = defaultdict(list)
    with redis.Redis.from_url(backend_url, decode_responses=True) as client:
        noted: Any = client.lrange(CALLS, 0, -1)
    for call in map(json.loads, noted):
        calls[UUID(call["of"])].append(call)
    return calls
