"""What heads wrote into the jobs' streams after somebody else had claimed the job. Asks Redis and
Postgres themselves.

Readers never see it: they trust tokens by their place alone. But a head that goes on without its
lease steals time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from uuid import UUID

import psycopg
import redis

from shardline.contract import keys
from tests.chaos.report.finding import Finding

CLAIMS = (
    "SELECT job_id, fence, extract(epoch FROM started_at)::float8"
    " FROM attempts WHERE job_id = ANY(%s)"
)


def stale_deltas(
    database_url: str, redis_url: str, ids: Sequence[UUID], *, lease_s: float
) -> list[Finding]:
    """I3: a head that wrote to a job's stream for longer than a lease after the next claim of it.

    What a frozen process had in hand comes late, but at once.
    """
    with psycopg.connect(database_url) as connection:
        claimed_s = {
            (job_id, fence): at_s
            for job_id, fence, at_s in connection.execute(CLAIMS, (list(ids),))
        }
    found = []
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        for job_id in {job_id for job_id, fence in claimed_s if fence > 1}:
            for fence, times_s in _late(_entries(client, job_id), job_id, claimed_s).items():
                span_s = max(times_s) - min(times_s)
                if span_s > lease_s:
                    written = f"{len(times_s)} deltas in {span_s:.1f} s"
                    what = f"fence {fence} wrote {written} after the next claim"
                    found.append(
                        Finding(invariant="I3", count="stale_deltas", what=what, job_id=job_id)
                    )
    return found


def _entries(client: redis.Redis, job_id: UUID) -> Iterator[tuple[int, float]]:
    """Fence and time of each that brings tokens."""
    entries: list[tuple[str, dict[str, str]]] = client.execute_command(
        "XRANGE", keys.job_stream(job_id), "-", "+"
    )
    for entry_id, fields in entries:
        delta = json.loads(fields["d"])
        if delta.get("ids"):
            yield delta["fence"], int(entry_id.partition("-")[0]) / 1000


def _late(
    entries: Iterable[tuple[int, float]], job_id: UUID, claimed_s: Mapping[tuple[UUID, int], float]
) -> Mapping[int, list[float]]:
    """By fence, the times of what came after the next claim."""
    late: dict[int, list[float]] = {}
    for fence, at_s in entries:
        if at_s > claimed_s.get((job_id, fence + 1), float("inf")):
            late.setdefault(fence, []).append(at_s)
    return late
