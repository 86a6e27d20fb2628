"""Fleets: workers that take their layers from a plan, and the plan of each model. Knows no planner.

A plan cuts a model into stages and gives each worker the place of one. Workers with equal places are in pipelines of
their own, or spares. Whoever makes plans names the version that it has read: of several at once one succeeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, func, select, text

from shardline.store.encoding import dump
from shardline.tables import plans, workers

LEASES = 2
"""A worker's lease is so many of a job's: another plan costs more than waiting for one that starts again."""

JOIN = text("""
INSERT INTO workers (worker, model, shapes, profile, lease_until)
VALUES (:worker, :model, CAST(:shapes AS jsonb), CAST(:profile AS jsonb), now() + make_interval(secs => :lease_s))
ON CONFLICT (worker) DO UPDATE SET model = excluded.model, shapes = excluded.shapes, profile = excluded.profile,
    lease_until = excluded.lease_until,
    -- One that was gone joins anew; one that starts again has been here.
    joined_at = CASE WHEN workers.lease_until > now() THEN workers.joined_at ELSE now() END
""")

BEAT = text("""
UPDATE workers SET lease_until = now() + make_interval(secs => :lease_s) WHERE worker = :worker
RETURNING (
    SELECT plans.split -> CAST(plans.stages ->> workers.worker AS integer) FROM plans WHERE plans.model = workers.model
)
""")

STORE = text("""
INSERT INTO plans (model, version, split, stages, tokens_per_s)
VALUES (:model, 1, CAST(:split AS jsonb), CAST(:stages AS jsonb), :tokens_per_s)
ON CONFLICT (model) DO UPDATE SET version = plans.version + 1, split = excluded.split, stages = excluded.stages,
    tokens_per_s = excluded.tokens_per_s, made_at = now()
WHERE plans.version = :version
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetWorker:
    """A worker whose lease runs."""

    worker: str
    shapes: dict[str, Any]
    """Of its model, as ModelCosts."""
    profile: dict[str, Any]
    """Of its device, as DeviceProfile."""
    here_s: float
    """Since it joined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """The plan of one model."""

    version: int
    """0: there is none yet."""
    split: tuple[tuple[int, int], ...]
    """Layers [first, stop) of each stage."""
    stages: Mapping[str, int]
    """By worker: the place of its stage in the split."""
    age_s: float


def join(connection: Connection, worker: str, *, model: str, shapes: object, profile: object, lease_s: float) -> None:
    """A worker offers its device to a model."""
    row = {"worker": worker, "model": model, "shapes": dump(shapes), "profile": dump(profile), "lease_s": lease_s}
    connection.execute(JOIN, row)


def beat(connection: Connection, worker: str, lease_s: float) -> tuple[int, int] | None:
    """Renews a worker's lease; returns the layers [first, stop) that the plan gives it, if it gives any.

    Raises LookupError if the worker has not joined.
    """
    row = connection.execute(BEAT, {"worker": worker, "lease_s": lease_s}).one_or_none()
    if row is None:
        raise LookupError(worker)
    return None if row[0] is None else (int(row[0][0]), int(row[0][1]))


def leave(connection: Connection, worker: str) -> None:
    """A worker that goes is missed at once, not after its lease."""
    connection.execute(delete(workers).where(workers.c.worker == worker))


def fleets(connection: Connection) -> list[str]:
    """The models for which workers are here, by name."""
    return list(connection.scalars(select(workers.c.model).where(_IS_HERE).distinct().order_by(workers.c.model)))


def workers_of(connection: Connection, model: str) -> list[FleetWorker]:
    """The workers of a model that are here, by name."""
    here_s = func.extract("epoch", func.now() - workers.c.joined_at).label("here_s")
    query = select(workers, here_s).where(workers.c.model == model, _IS_HERE).order_by(workers.c.worker)
    return [
        FleetWorker(worker=row.worker, shapes=row.shapes, profile=row.profile, here_s=float(row.here_s))
        for row in connection.execute(query)
    ]


def plan_of(connection: Connection, model: str) -> FleetPlan:
    """The plan of a model; version 0 if there is none."""
    age_s = func.extract("epoch", func.now() - plans.c.made_at).label("age_s")
    row = connection.execute(select(plans, age_s).where(plans.c.model == model)).one_or_none()
    if row is None:
        return FleetPlan(version=0, split=(), stages={}, age_s=0.0)
    split = tuple((int(first), int(stop)) for first, stop in row.split)
    return FleetPlan(version=row.version, split=split, stages=row.stages, age_s=float(row.age_s))


def store_plan(
    connection: Connection,
    model: str,
    *,
    version: int,
    split: Sequence[tuple[int, int]],
    stages: Mapping[str, int],
    tokens_per_s: float | None,
) -> bool:
    """Replaces the plan that has this version; False if somebody else has replaced it."""
    row = {"model": model, "version": version, "split": dump(split), "stages": dump(stages)}
    return connection.execute(STORE, {**row, "tokens_per_s": tokens_per_s}).rowcount == 1


_IS_HERE = workers.c.lease_until > func.now()
