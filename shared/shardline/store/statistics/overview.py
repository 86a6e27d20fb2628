"""What an installation does right now: pipelines with their load and speed, and jobs that have not
ended by model and by tenant. Reads only; each count is bounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, text

from shardline.contract.job import JobState
from shardline.contract.tables import IS_READY, WAITS
from shardline.store.pipelines import LivePipeline, live_pipelines
from shardline.store.statistics.demand import oldest_queued

MAX_COUNTED = 10_000
"""Jobs of one state of one model: this many means at least."""

WAITING = "waiting"

OPEN_JOBS = text(f"""
SELECT name AS model, state, tenant_id, pipeline, count(*) AS num_jobs,
    count(*) FILTER (WHERE state = 'queued' AND paused_by IS NOT NULL) AS num_paused
FROM models CROSS JOIN (VALUES ('queued'), ('running')) AS states (state)
    CROSS JOIN LATERAL (
        SELECT tenant_id, pipeline, paused_by FROM jobs
        WHERE jobs.state = states.state AND jobs.model = models.name AND ({IS_READY})
        LIMIT :max_counted
    ) AS counted
GROUP BY 1, 2, 3, 4
UNION ALL
SELECT name, 'waiting', tenant_id, NULL, count(*), 0
FROM models CROSS JOIN LATERAL (
    SELECT tenant_id FROM jobs WHERE jobs.model = models.name AND ({WAITS}) LIMIT :max_counted
) AS counted
GROUP BY 1, 3
""")  # noqa: S608 (a constant of ours)

# An epoch's rows and joules only grow.
COMPUTED = text("""
SELECT pipelines.id, num_rows, energy_j FROM pipelines
JOIN pipeline_energy ON pipeline_energy.pipeline = pipelines.id
    AND pipeline_energy.epoch = pipelines.epoch
""")

NOW = text("SELECT now()")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenJobs:
    """How many jobs wait and run."""

    num_queued: int = 0
    """Without those that are paused or wait for others."""
    num_running: int = 0
    num_paused: int = 0
    num_waiting: int = 0
    """For their parents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoad:
    """One registered model."""

    model: str
    jobs: OpenJobs
    oldest_s: float
    """So long the job has waited that has waited longest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineLoad:
    """One pipeline with a running lease."""

    pipeline: LivePipeline
    num_running: int
    num_rows: int | None
    """Tokens that it has computed in this epoch, of prompts and of completions; None before the
    first count."""
    energy_j: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """An installation at one moment of Postgres's clock."""

    taken_at: datetime
    models: tuple[ModelLoad, ...]
    pipelines: tuple[PipelineLoad, ...]
    tenants: Mapping[str, OpenJobs]


def overview(connection: Connection) -> Overview:
    """Reads it in a few bounded statements."""
    rows = connection.execute(OPEN_JOBS, {"max_counted": MAX_COUNTED}).all()
    waits = oldest_queued(connection)
    computed = {row.id: row for row in connection.execute(COMPUTED)}
    running: dict[str, int] = {}
    by_model: dict[str, OpenJobs] = dict.fromkeys(sorted(waits), OpenJobs())
    by_tenant: dict[str, OpenJobs] = {}
    for row in rows:
        is_running = row.state == JobState.RUNNING
        if is_running and row.pipeline is not None:
            running[row.pipeline] = running.get(row.pipeline, 0) + row.num_jobs
        for counts, name in ((by_model, row.model), (by_tenant, row.tenant_id)):
            was = counts.get(name, OpenJobs())
            counts[name] = OpenJobs(
                num_queued=was.num_queued
                + (row.num_jobs - row.num_paused if row.state == JobState.QUEUED else 0),
                num_running=was.num_running + (row.num_jobs if is_running else 0),
                num_paused=was.num_paused + row.num_paused,
                num_waiting=was.num_waiting + (row.num_jobs if row.state == WAITING else 0),
            )
    return Overview(
        taken_at=connection.execute(NOW).scalar_one(),
        models=tuple(
            ModelLoad(model=name, jobs=jobs, oldest_s=waits.get(name, 0.0))
            for name, jobs in by_model.items()
        ),
        pipelines=tuple(
            PipelineLoad(
                pipeline=each,
                num_running=running.get(each.id, 0),
                num_rows=computed[each.id].num_rows if each.id in computed else None,
                energy_j=computed[each.id].energy_j if each.id in computed else None,
            )
            for each in live_pipelines(connection)
        ),
        tenants=by_tenant,
    )
