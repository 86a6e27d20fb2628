"""Whether an endpoint heard of every end after it was made. Knows no server."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from uuid import UUID

from tests.chaos.judge.tenants.rows import Row
from tests.chaos.load.tenants.ledger import DeliveryHeard, HeardEndpoint

TAKEN = 200


def broken_webhooks(
    endpoint: HeardEndpoint,
    heard: Sequence[DeliveryHeard],
    jobs: Sequence[Row],
    deliveries: Sequence[Row],
) -> Iterator[str]:
    """Yields ends that nobody was told of, and what was told wrongly. `jobs` are the tenant's."""
    by_job: dict[UUID | None, list[DeliveryHeard]] = defaultdict(list)
    for one in heard:
        by_job[one.job_id].append(one)
        if not one.is_signed:
            yield f"{one.delivery} of job {one.job_id} is not signed with the endpoint's secret"
    rows: dict[UUID, list[Row]] = defaultdict(list)
    for row in deliveries:
        rows[row["object_id"]].append(row)
    known = {job["id"]: job for job in jobs}
    for job_id in by_job:
        if job_id not in known:
            yield f"it heard of {job_id}, which is no job of its tenant"
    for job in jobs:
        is_after = job["finished_at"] is not None and (
            job["finished_at"] > endpoint.acknowledged_at
        )
        for problem in _problems(job, by_job[job["id"]], rows[job["id"]], is_after=is_after):
            yield f"job {job['id']}: {problem}"


def _problems(
    job: Row, heard: Sequence[DeliveryHeard], rows: Sequence[Row], *, is_after: bool
) -> Iterator[str]:
    names = {one.delivery for one in heard}
    if len(names) > 1 or len(rows) > 1:
        yield f"its end has {len(rows)} deliveries, and came under {len(names)} ids"
    wanted = f"job.{job['state']}"
    for one in heard:
        if one.event_type != wanted:
            yield f"it is {job['state']}, and {one.event_type} was told"
    has_taken = any(one.is_signed and one.status_code == TAKEN for one in heard)
    states: Mapping[str, bool] = {row["state"]: True for row in rows}
    if is_after and not has_taken and "dead" not in states:
        yield f"nobody heard of its end; deliveries: {[dict(row) for row in rows]}"
    if "delivered" in states and not has_taken:
        yield "its delivery is delivered, and nobody has taken it"
    if has_taken and not rows:
        yield "its end was told, and no delivery is there"
