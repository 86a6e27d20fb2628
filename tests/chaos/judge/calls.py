"""Whether calls that had to come are calls of offered tools, with arguments of their schemas. Plain
SQL: knows nothing of the product's code, only its tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema_rs
import psycopg

from tests.chaos.report.finding import Finding

# The limit of tokens may cut the last call.
CALLS = """
SELECT jobs.id, jobs.params -> 'tools', results.tool_calls
FROM jobs JOIN results ON results.job_id = jobs.id
WHERE jobs.params ->> 'tool_choice' NOT IN ('auto', 'none') AND state = 'succeeded'
    AND finish_reason <> 'length'
"""


def invalid_calls(database_url: str) -> list[Finding]:
    """I2: a reply that had to call and did not, or called what was not offered, or so that the
    tool's schema does not hold."""
    with psycopg.connect(database_url) as connection:
        rows = connection.execute(CALLS).fetchall()
    return [
        Finding(invariant="I2", count="invalid_calls", what=problem, job_id=job_id)
        for job_id, tools, calls in rows
        if (problem := problem_of(calls or (), tools)) is not None
    ]


def problem_of(calls: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> str | None:
    """What is wrong with them; None: nothing."""
    schemas = {tool["function"]["name"]: _schema(tool["function"]["parameters"]) for tool in tools}
    if not calls:
        return "it had to call a tool, and did not"
    for call in calls:
        name, arguments = (call["function"][field] for field in ("name", "arguments"))
        if name not in schemas:
            return f"{name!r} was called, {sorted(schemas)} were offered"
        try:
            is_valid = jsonschema_rs.is_valid(schemas[name], json.loads(arguments))
        except ValueError:
            is_valid = False
        if not is_valid:
            return f"{name!r} was called with {arguments!r}"
    return None


def _schema(parameters: Any) -> Any:
    """As an object: rows have its text, which keeps its order."""
    return json.loads(parameters) if isinstance(parameters, str) else parameters
