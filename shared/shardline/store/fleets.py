"""Fleets: workers that take their layers from a plan, and the plan of each model. Knows no planner.

A plan cuts a model into stages, for each of its pipelines in another way, and gives each worker the
place of one. Workers with equal places are in replicas of a pipeline, or spares. A planner names
the version that it has read: of several at once one succeeds. Locks: the advisory lock PLANS_LOCK,
for who changes plans of several models: no worker is in two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, and_, delete, func, or_, select, text

from shardline.contract.tables import plans, workers
from shardline.store.connection.encoding import dump

PLANS_LOCK = 7_236_003

MAX_PEERS = 32
LEASES = 2
"""A worker's lease in leases of a job: another plan costs more than waiting for one that starts
again."""
BEATS_IN_LEASE = 10
COOL_DOWN_POLLS = 60
"""Between two new cuts that only make a fleet faster."""

ANNOUNCE = text("""
INSERT INTO workers (worker, model, further, machine, address, lease_until)
VALUES (:worker, :model, CAST(:further AS jsonb), :machine, :address,
    now() + make_interval(secs => :lease_s))
-- One that starts again keeps its offer and its lease: it may fail before it joins again.
ON CONFLICT (worker) DO UPDATE SET machine = excluded.machine, address = excluded.address,
    lease_until = CASE
        WHEN workers.profile IS NULL THEN excluded.lease_until ELSE workers.lease_until
    END
""")

JOIN = text("""
INSERT INTO workers (worker, model, shapes, profile, further, lease_until)
VALUES (:worker, :model, CAST(:shapes AS jsonb), CAST(:profile AS jsonb), CAST(:further AS jsonb),
    now() + make_interval(secs => :lease_s))
ON CONFLICT (worker) DO UPDATE SET model = excluded.model, shapes = excluded.shapes,
    profile = excluded.profile, further = excluded.further, lease_until = excluded.lease_until,
    -- One that was gone gets a new time; one that starts again keeps its time.
    joined_at = CASE
        WHEN workers.lease_until > now() AND workers.profile IS NOT NULL THEN workers.joined_at
        ELSE now()
    END
""")

PEERS = text("""
SELECT DISTINCT ON (machine) machine, address FROM workers
WHERE lease_until > now() AND worker <> :worker AND address IS NOT NULL
ORDER BY machine LIMIT :num
""")

REFRESH = text("""
UPDATE workers SET profile = CASE WHEN model = :model THEN CAST(:profile AS jsonb) ELSE profile END,
    -- Of a model that is not among them nothing is set.
    further = jsonb_set(
        further, ARRAY[CAST(:model AS text), 'profile'], CAST(:profile AS jsonb), false)
WHERE worker = :worker AND profile IS NOT NULL
""")

BEAT = text("""
UPDATE workers SET lease_until = now() + make_interval(secs => :lease_s) WHERE worker = :worker
RETURNING (
    SELECT jsonb_build_array(
        plans.model, plans.split -> CAST(plans.stages ->> workers.worker AS integer))
    FROM plans WHERE plans.stages ? workers.worker LIMIT 1
)
""")

WANTED = text("""
SELECT name FROM unnest(CAST(:models AS text[])) AS name
WHERE EXISTS (SELECT FROM jobs WHERE jobs.model = name AND state = 'running')
    OR EXISTS (
        SELECT FROM jobs WHERE jobs.model = name AND state = 'queued' AND sent_at IS NOT NULL
    )
    OR EXISTS (
        SELECT FROM jobs WHERE jobs.model = name AND state = 'queued' AND sent_at IS NULL
            AND prepared_at IS NOT NULL AND paused_by IS NULL AND not_before <= now()
    )
""")

SERVED = text("""
SELECT model, extract(epoch FROM now() - min(ready_at)) AS served_s FROM pipelines
WHERE lease_until > now() AND ready_at IS NOT NULL GROUP BY model
""")

STORE = text("""
INSERT INTO plans (model, version, split, stages, tokens_per_s)
VALUES (:model, 1, CAST(:split AS jsonb), CAST(:stages AS jsonb), :tokens_per_s)
ON CONFLICT (model) DO UPDATE SET version = plans.version + 1, split = excluded.split,
    stages = excluded.stages, tokens_per_s = excluded.tokens_per_s, made_at = now()
WHERE plans.version = :version
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetWorker:
    """A worker with a running lease. What it offers is as it wrote it: unchecked."""

    worker: str
    shapes: Any
    """Of its model, as ModelCosts."""
    profile: Any
    """Of its device, as DeviceProfile."""
    here_s: float
    """Since it joined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAssignment:
    """What a plan gives a worker."""

    model: str
    layers: tuple[int, int]
    """[first, stop)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """The plan of one model."""

    version: int
    """0: there is none yet."""
    split: tuple[tuple[int, int], ...]
    """Layers [first, stop) of each stage, one pipeline after the other; none if the model has no
    workers."""
    stages: Mapping[str, int]
    """By worker: the place of its stage in the split."""
    age_s: float
    tokens_per_s: float | None = None
    """Predicted of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOffer:
    """A model that a worker may serve: ModelCosts of the model, DeviceProfile of the worker's
    device with it."""

    shapes: object
    profile: object


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddress:
    """Tells where a worker answers others that measure the link to its machine."""

    machine: str
    address: str


def announce(
    connection: Connection, worker: str, models: Sequence[str], *, lease_s: float, peer: PeerAddress
) -> None:
    """A worker is about to join with these models; again before its lease ends, if measuring its
    device takes long."""
    model, *further = models
    connection.execute(delete(workers).where(workers.c.worker == worker, ~_IS_HERE))
    row = {"model": model, "further": dump(dict.fromkeys(further)), "lease_s": lease_s}
    connection.execute(
        ANNOUNCE, {"worker": worker, **row, "machine": peer.machine, "address": peer.address}
    )


def peers(connection: Connection, worker: str) -> list[PeerAddress]:
    """One other worker that answers on each machine, at most MAX_PEERS of them."""
    rows = connection.execute(PEERS, {"worker": worker, "num": MAX_PEERS})
    return [PeerAddress(machine=row.machine, address=row.address) for row in rows]


def holders(connection: Connection, model: str) -> list[str]:
    """Returns where workers that have a model's files answer, at most MAX_PEERS, in an order that
    changes."""
    serves = or_(workers.c.model == model, workers.c.further.has_key(model))
    found = select(workers.c.address).where(serves, _HAS_JOINED, workers.c.address.is_not(None))
    return list(connection.scalars(found.order_by(func.random()).limit(MAX_PEERS)))


def join(
    connection: Connection, worker: str, offers: Mapping[str, WorkerOffer], *, lease_s: float
) -> None:
    """A worker offers its device to these models, of which it will serve one at a time."""
    (model, first), *further = offers.items()
    others = {name: {"shapes": offer.shapes, "profile": offer.profile} for name, offer in further}
    row = {
        "model": model,
        "shapes": dump(first.shapes),
        "profile": dump(first.profile),
        "further": dump(others),
    }
    connection.execute(JOIN, {**row, "worker": worker, "lease_s": lease_s})


def beat(connection: Connection, worker: str, lease_s: float) -> LayerAssignment | None:
    """Renews a worker's lease; returns the model and the layers that a plan gives it, if one gives
    any.

    Raises LookupError if the worker has not joined.
    """
    row = connection.execute(BEAT, {"worker": worker, "lease_s": lease_s}).one_or_none()
    if row is None:
        raise LookupError(worker)
    return (
        None
        if row[0] is None
        else LayerAssignment(model=row[0][0], layers=(int(row[0][1][0]), int(row[0][1][1])))
    )


def refresh(connection: Connection, worker: str, model: str, profile: object) -> None:
    """A worker's device has become faster or slower with a model that it has joined with."""
    connection.execute(REFRESH, {"worker": worker, "model": model, "profile": dump(profile)})


def leave(connection: Connection, worker: str) -> None:
    """A worker that goes is missed at once, not after its lease."""
    connection.execute(delete(workers).where(workers.c.worker == worker))


def fleets(connection: Connection) -> list[str]:
    """The models that workers who are here may serve, by name."""
    is_mapping = func.jsonb_typeof(workers.c.further) == "object"
    further = select(func.jsonb_object_keys(workers.c.further)).where(_HAS_JOINED, is_mapping)
    return sorted(connection.scalars(select(workers.c.model).where(_HAS_JOINED).union(further)))


def coming(connection: Connection) -> dict[str, float]:
    """Returns, by model, for how many seconds the newest of the workers that are about to join has
    been announced."""
    found: dict[str, float] = {}
    for row in connection.execute(
        select(workers, _HERE_S).where(_IS_HERE, workers.c.profile.is_(None))
    ):
        for model in (row.model, *(row.further if isinstance(row.further, dict) else ())):
            found[model] = min(float(row.here_s), found.get(model, math.inf))
    return found


def workers_of(connection: Connection, model: str) -> list[FleetWorker]:
    """The workers that are here and may serve a model, by name."""
    serves = or_(workers.c.model == model, workers.c.further.has_key(model))
    found = []
    for row in connection.execute(
        select(workers, _HERE_S).where(serves, _HAS_JOINED).order_by(workers.c.worker)
    ):
        own = (
            {"shapes": row.shapes, "profile": row.profile}
            if row.model == model
            else row.further[model]
        )
        shapes, profile = (
            own.get(name) if isinstance(own, dict) else None for name in ("shapes", "profile")
        )
        here_s = float(row.here_s)
        found.append(FleetWorker(worker=row.worker, here_s=here_s, shapes=shapes, profile=profile))
    return found


def plan_of(connection: Connection, model: str) -> FleetPlan:
    """The plan of a model; version 0 if there is none."""
    return all_plans(connection).get(model, NO_PLAN)


def all_plans(connection: Connection) -> dict[str, FleetPlan]:
    """The plan of each model that has one."""
    age_s = func.extract("epoch", func.now() - plans.c.made_at).label("age_s")
    return {
        row.model: FleetPlan(
            version=row.version,
            split=tuple((int(first), int(stop)) for first, stop in row.split),
            stages=row.stages,
            age_s=float(row.age_s),
            tokens_per_s=row.tokens_per_s,
        )
        for row in connection.execute(select(plans, age_s))
    }


def wanted(connection: Connection, models: Sequence[str]) -> set[str]:
    """Those of the models that have jobs which run or could."""
    return set(connection.scalars(WANTED, {"models": list(models)}))


def served(connection: Connection) -> dict[str, float]:
    """Returns for how many seconds each model has had a pipeline that is ready."""
    return {row.model: float(row.served_s) for row in connection.execute(SERVED)}


def lock_plans(connection: Connection) -> None:
    """Locks until the end of the transaction: no other one stores plans of several models."""
    connection.execute(select(func.pg_advisory_xact_lock(PLANS_LOCK)))


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


NO_PLAN = FleetPlan(version=0, split=(), stages={}, age_s=math.inf)
_IS_HERE = workers.c.lease_until > func.now()
_HAS_JOINED = and_(_IS_HERE, workers.c.profile.is_not(None))
_HERE_S = func.extract("epoch", func.now() - workers.c.joined_at).label("here_s")
