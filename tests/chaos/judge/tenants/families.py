"""Whether jobs that wait for others ran after these, with their texts, or failed with them. Knows
no server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from uuid import UUID

from tests.chaos.judge.tenants.rows import Row, latest
from tests.chaos.load.tenants.ledger import JobFamily

CODE = "parent_failed"


def broken_families(families: Sequence[JobFamily], jobs: Mapping[UUID, Row]) -> Iterator[str]:
    """Yields children that are missing, came too early, ended otherwise than their parents say, or
    had another prompt than their parents' texts make."""
    for family in families:
        child = jobs.get(family.child)
        parents = [jobs.get(job_id) for job_id in family.parents]
        known = [parent for parent in parents if parent is not None]
        if child is None or len(known) < len(parents):
            yield f"child {family.child} or a parent of it has no row"
            continue
        for problem in _problems(family, child, known):
            yield f"child {family.child}: {problem}"


def _problems(family: JobFamily, child: Row, parents: Sequence[Row]) -> Iterator[str]:
    ended_at = latest([parent["finished_at"] for parent in parents])
    all_succeeded = all(parent["state"] == "succeeded" for parent in parents)
    if child["finished_at"] is None:
        yield f"it is still {child['state']}"
        return
    if ended_at is None:
        yield f"it is {child['state']}, and a parent has not ended"
        return
    if not all_succeeded and not family.runs_anyway:
        code = (child["error"] or {}).get("code")
        if (child["state"], code) != ("failed", CODE) or child["fence"]:
            yield (
                f"a parent did not succeed: it is {child['state']} ({code}) after"
                f" {child['fence']} attempts"
            )
        return
    if child["state"] != "succeeded":
        yield f"it is {child['state']}: {child['error']}"
        return
    if child["began_at"] <= ended_at:
        yield f"it began {ended_at - child['began_at']} before its last parent's end"
    if family.prompt_ids is not None and child["prompt_ids"] != list(family.prompt_ids):
        yield "its prompt is not that of its parents' texts"
