"""The choices of requests that came again: their rows, and whether they are those that were asked
for. Inserts nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from uuid import UUID

from sqlalchemy import Connection, text

from shardline.base.errors import Conflict, ShardlineError
from shardline.store.connection.encoding import dump
from shardline.store.idempotency import repeated

CHOICES = text("""
SELECT choices.choice_of, choices.id FROM jobs AS choices
JOIN jobs AS first ON first.id = choices.choice_of AND first.tenant_id = choices.tenant_id
WHERE choices.choice_of = ANY(CAST(:ids AS uuid[])) AND choices.choice_index > 0
ORDER BY choices.choice_of, choices.choice_index
""")


def other_choices(connection: Connection, ids: Sequence[UUID]) -> dict[UUID, tuple[UUID, ...]]:
    """Returns the choices behind the first one, in their order, of those that have some."""
    found: dict[UUID, list[UUID]] = {}
    for row in connection.execute(CHOICES, {"ids": list(ids)}):
        found.setdefault(row.choice_of, []).append(row.id)
    return {first: tuple(others) for first, others in found.items()}


def repeated_choices(
    connection: Connection, asked: Sequence[tuple[UUID, Sequence[str]]]
) -> list[tuple[UUID, ...] | ShardlineError]:
    """Finds the other choices of first ones that are there. Each first one comes with what a
    repeat asks for behind it, as JSON objects: another number of them, or another choice, is a
    Conflict."""
    there = other_choices(connection, [first for first, _ in asked])
    found: list[tuple[UUID, ...] | ShardlineError] = []
    for first, wanted in asked:
        others = there.get(first, ())
        if len(others) != len(wanted):
            problem = (
                f"job {first} is the first of {1 + len(others)} choices, "
                f"and {1 + len(wanted)} are asked for; use a new id or idempotency key"
            )
            found.append(Conflict(problem))
        else:
            found.append(_difference(connection, first, others, wanted) or others)
    return found


def _difference(
    connection: Connection, first: UUID, others: Sequence[UUID], wanted: Sequence[str]
) -> Conflict | None:
    """Compares each of them with its row, by the rule of all repeats."""
    rows = [
        {**json.loads(fields), "id": job_id, "number": number, "idempotency_key": None}
        for number, (job_id, fields) in enumerate(zip(others, wanted, strict=True))
    ]
    if not rows:
        return None
    for number, outcome in sorted(repeated(connection, dump(rows), range(len(rows))).items()):
        if isinstance(outcome, ShardlineError):
            return Conflict(f"choice {1 + number} of job {first}: {outcome}")
    return None
