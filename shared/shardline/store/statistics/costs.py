"""What energy costs: what pipelines took, rates, and the kWh, money and carbon of jobs.

The view `job_costs` (migrations 0013, 0018) gives an attempt the mean of its pipeline's epoch for
each token row that it computed, at the rate of its end. A rate holds from its moment until the next
one of its kind.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from datetime import date, datetime
from typing import Any, Literal
from uuid import UUID

from sqlalchemy import Connection, text

from shardline.store.connection.encoding import dump

RateKind = Literal["price", "carbon"]
"""Money, and grams of CO2 equivalent, for each kWh."""

MAX_JOBS = 100_000
"""Of one report, the newest: each is looked up with its attempts and its result. 8 s on two cores
with much other work; a gateway gives a list 10 s."""
MAX_GROUPS = 10_000

PUT_EPOCH_ENERGY = text("""
INSERT INTO pipeline_energy (pipeline, epoch, source, energy_j, num_rows)
VALUES (:pipeline, :epoch, :source, :energy_j, :num_rows)
ON CONFLICT (pipeline, epoch) DO UPDATE
SET source = excluded.source, energy_j = excluded.energy_j, num_rows = excluded.num_rows,
    updated_at = now()
""")

PUT_SERIES = text("""
INSERT INTO energy_rates (kind, begins_at, per_kwh)
SELECT :kind, begins_at, per_kwh
FROM jsonb_to_recordset(CAST(:rates AS jsonb)) AS rates(begins_at timestamptz, per_kwh float8)
ON CONFLICT (kind, begins_at) DO UPDATE SET per_kwh = excluded.per_kwh
WHERE energy_rates.per_kwh <> excluded.per_kwh
""")

PUT_FIXED = text("""
-- The rate that holds now. The first one counts for all that was before it, a later one
-- from now on.
WITH present AS (
    SELECT (SELECT per_kwh FROM energy_rates WHERE kind = :kind AND begins_at <= now()
        ORDER BY begins_at DESC LIMIT 1) AS per_kwh
)
INSERT INTO energy_rates (kind, begins_at, per_kwh)
SELECT :kind, CASE WHEN present.per_kwh IS NULL THEN to_timestamp(0) ELSE now() END, :per_kwh
FROM present WHERE present.per_kwh IS DISTINCT FROM CAST(:per_kwh AS float8)
ON CONFLICT (kind, begins_at) DO NOTHING
""")

PRESENT = text("""
SELECT DISTINCT ON (kind) kind, per_kwh FROM energy_rates WHERE begins_at <= now()
ORDER BY kind, begins_at DESC
""")

COSTS = text("""
-- The newest jobs of the window.
WITH counted AS (
    SELECT * FROM job_costs
    WHERE created_at > now() - make_interval(days => :num_days)
        AND (CAST(:model AS text) IS NULL OR model = :model)
        AND (CAST(:tenant AS text) IS NULL OR tenant_id = :tenant)
    ORDER BY created_at DESC, job_id DESC LIMIT :max_jobs
),
-- By what was asked for: the other columns are null.
labeled AS (
    SELECT *,
        CASE WHEN 'day' = ANY(CAST(:by AS text[]))
            THEN (created_at AT TIME ZONE 'UTC')::date END AS on_day,
        CASE WHEN 'model' = ANY(CAST(:by AS text[])) THEN model END AS of_model,
        CASE WHEN 'tenant' = ANY(CAST(:by AS text[])) THEN tenant_id END AS of_tenant
    FROM counted
)
SELECT on_day, of_model, of_tenant, count(*) AS num_jobs,
    coalesce(sum(num_unknown), 0)::bigint AS num_unknown,
    coalesce(sum(prompt_tokens), 0) AS prompt_tokens,
    coalesce(sum(completion_tokens), 0) AS completion_tokens,
    sum(kwh) AS kwh, sum(cost) AS cost, sum(carbon_g) AS carbon_g,
    array_remove(array_agg(DISTINCT energy_source), NULL) AS sources
FROM labeled
GROUP BY on_day, of_model, of_tenant
ORDER BY on_day, of_model, of_tenant LIMIT :max_groups
""")


SPENT = text("""
SELECT sum(energy_j) AS energy_j, sum(cost) AS cost, sum(carbon_g) AS carbon_g,
    string_agg(DISTINCT energy_source, '+') AS energy_source
FROM job_costs WHERE job_id = ANY(CAST(:ids AS uuid[]))
""")

PRUNE = (
    # What held when the oldest job came stays, and all that came after it.
    text("""
DELETE FROM energy_rates WHERE begins_at < (
    SELECT max(begins_at) FROM energy_rates AS earlier WHERE earlier.kind = energy_rates.kind
        AND earlier.begins_at <= (SELECT coalesce(min(created_at), now()) FROM jobs)
)
"""),
    text("""
DELETE FROM pipeline_energy
WHERE updated_at < (SELECT coalesce(min(created_at), now()) FROM jobs)
"""),
)
"""Rates and epochs that no job was computed under."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEnergy:
    """What the devices of a pipeline have drawn in an epoch while they computed."""

    pipeline: str
    epoch: int
    source: str
    """How the power of its stages is known."""
    energy_j: float
    num_rows: int
    """Token rows of all steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Jobs of one day, model and tenant, or of all where that is None. A job's day is that on which
    it came, in UTC."""

    day: date | None
    model: str | None
    tenant: str | None
    num_jobs: int
    num_unknown: int
    """Attempts of unknown energy: they count as nothing."""
    prompt_tokens: int
    completion_tokens: int
    """Of results: what was lost with an attempt is in the energy, not here."""
    kwh: float | None
    cost: float | None
    """Money of the currency in which rates are given. None without a rate."""
    carbon_g: float | None
    """Grams of CO2 equivalent."""
    sources: list[str]
    """How the power was known: rapl, nvml, setting, table."""


def put_epoch_energy(connection: Connection, energy: EpochEnergy) -> None:
    """Write what is known by now of a pipeline's epoch, in place of what was."""
    connection.execute(PUT_EPOCH_ENERGY, asdict(energy))


def put_series(connection: Connection, kind: RateKind, rates: Mapping[datetime, float]) -> int:
    """Write rates by the moment from which they hold. Returns how many are new or have changed."""
    rows = [{"begins_at": begins_at, "per_kwh": per_kwh} for begins_at, per_kwh in rates.items()]
    return connection.execute(PUT_SERIES, {"kind": kind, "rates": dump(rows)}).rowcount


def put_fixed(connection: Connection, kind: RateKind, per_kwh: float) -> int:
    """Write one rate that holds from now on, unless it does already; the first one holds for the
    past too."""
    return connection.execute(PUT_FIXED, {"kind": kind, "per_kwh": per_kwh}).rowcount


def present_rates(connection: Connection) -> dict[str, float]:
    """Returns, by kind, those that hold now."""
    return {row.kind: row.per_kwh for row in connection.execute(PRESENT)}


def costs(
    connection: Connection,
    *,
    num_days: int,
    by: Collection[str],
    model: str | None = None,
    tenant: str | None = None,
) -> list[Cost]:
    """Sums up jobs that came within `num_days` days, MAX_JOBS at most, by any of `day`, `model` and
    `tenant`."""
    limits = {"max_jobs": MAX_JOBS, "max_groups": MAX_GROUPS}
    asked = {"num_days": num_days, "by": list(by), "model": model, "tenant": tenant}
    return [
        Cost(
            day=row.on_day,
            model=row.of_model,
            tenant=row.of_tenant,
            num_jobs=row.num_jobs,
            num_unknown=row.num_unknown,
            prompt_tokens=row.prompt_tokens,
            completion_tokens=row.completion_tokens,
            kwh=row.kwh,
            cost=row.cost,
            carbon_g=row.carbon_g,
            sources=row.sources,
        )
        for row in connection.execute(COSTS, {**asked, **limits})
    ]


def spent(connection: Connection, ids: Collection[UUID]) -> dict[str, Any]:
    """Returns the joules of all together, how their power was known, and what they cost in money
    and grams of CO2 equivalent; None is not known."""
    return dict(connection.execute(SPENT, {"ids": list(ids)}).mappings().one())
