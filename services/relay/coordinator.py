"""The coordinator: gives the workers of each fleet their model and their stages, and others when
workers come and go or jobs ask for another model. Every relay has one; of several that plan at once
one succeeds. The rules are in shardline_fleet.deployment.fleet_planner and
shardline_fleet.deployment.turns."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec
import structlog
from sqlalchemy import Connection

from services.relay.loop import STALL, Loop, LoopContext
from shardline.base.clock import lease_clock_s
from shardline.base.config import Times
from shardline.base.errors import Invalid
from shardline.store import fleets
from shardline.store.connection.encoding import dump
from shardline.store.fleets import COOL_DOWN_POLLS, NO_PLAN, FleetPlan, FleetWorker
from shardline_costs import ModelCosts, Workload
from shardline_costs.device_profile import profile_of
from shardline_fleet.deployment.fleet_planner import Deployment, FleetPlanner
from shardline_fleet.deployment.turns import Turn, Turns

log = structlog.get_logger(__name__)

SETTLE_POLLS = 3
"""A fleet gets its first plan when no worker has joined for this many polls: workers of one start
come one by one."""
PATIENCE_POLLS = 120
"""So long its first plan waits for workers that are announced: they measure their devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSnapshot:
    """What Postgres knows at one moment of all fleets."""

    workers: Mapping[str, Mapping[str, FleetWorker]]
    """By model and name: those that are here and may serve the model."""
    unusable: Mapping[str, str]
    """By name: why a worker that is here is in no plan."""
    joining: Mapping[str, float]
    """By model: seconds since the newest worker that has not joined yet was announced."""
    plans: Mapping[str, FleetPlan]
    wanted: Collection[str]
    served_s: Mapping[str, float]

    @classmethod
    def of(cls, connection: Connection) -> FleetSnapshot:
        """Reads it."""
        models = fleets.fleets(connection)
        unusable: dict[str, str] = {}
        workers: dict[str, dict[str, FleetWorker]] = {model: {} for model in models}
        for model in models:
            for each in fleets.workers_of(connection, model):
                problem = _problem(each)
                if problem is None:
                    workers[model][each.worker] = each
                else:
                    unusable[each.worker] = f"{model}: {problem}"
        return cls(
            workers=workers,
            unusable=unusable,
            joining=fleets.coming(connection),
            plans=fleets.all_plans(connection),
            wanted=fleets.wanted(connection, models) if len(models) > 1 else models,
            served_s=fleets.served(connection) if len(models) > 1 else {},
        )

    def plan(self, model: str) -> FleetPlan:
        """The plan of a model, which may have none."""
        return self.plans.get(model, NO_PLAN)

    def planner(self, model: str, workers: Collection[str]) -> FleetPlanner:
        """Makes the planner of a model for some of its workers."""
        members = self.workers[model]
        # All workers of a model have one config: the shapes of any will do.
        costs = msgspec.convert(next(iter(members.values())).shapes, ModelCosts)
        profiles = {worker: profile_of(members[worker].profile, worker) for worker in workers}
        return FleetPlanner(costs, profiles, Workload())

    def fits(self, model: str, workers: Collection[str]) -> bool:
        """Whether these workers hold the model."""
        planned = self.plan(model).stages
        if planned and set(planned) <= set(workers):
            return True
        try:
            self.planner(model, workers).replan(None, may_improve=False)
        except Exception:  # noqa: BLE001 (must not stop the others; `_replanned` tells)
            return False
        return True


class Coordinator(Loop):
    """Looks at all fleets once in a poll."""

    def __init__(self, context: LoopContext) -> None:
        super().__init__("coordinator", context.metrics.errors)
        self._database = context.database
        self._times = context.times
        self._answered_s = -math.inf
        """The last answer of Postgres, by the lease clock."""
        self._trusts_after_s = math.inf
        """Until then a worker that seems to be gone may only have been unable to beat."""
        self._seen: dict[str, object] = {}
        """By model: what a look saw that changed nothing. The same need not be planned again, which
        takes up to a second."""
        self._told: Mapping[str, str] = {}
        """The workers that the log knows to be in no plan."""

    def turn(self) -> float:
        """Plan for each fleet that needs it."""
        with self._database.begin() as connection:
            snapshot = FleetSnapshot.of(connection)
        now_s = lease_clock_s()
        if now_s - self._answered_s > STALL * self._times.lease_s:
            self._trusts_after_s = now_s + fleets.LEASES * self._times.lease_s
        self._answered_s = now_s
        self._tell_unusable(snapshot.unusable)
        assignment = self._assignment(snapshot)
        changes = {}
        for model in sorted({*snapshot.workers, *snapshot.plans}):
            deployment = self._deployment(model, snapshot, assignment)
            if deployment is not None:
                changes[model] = deployment
        if changes:
            self._store(snapshot, changes)
        return self._times.poll_s

    def _tell_unusable(self, unusable: Mapping[str, str]) -> None:
        for worker, problem in unusable.items():
            if self._told.get(worker) != problem:
                log.warning("a worker is in no plan", worker=worker, problem=problem)
        self._told = unusable

    def _assignment(self, snapshot: FleetSnapshot) -> dict[str, str]:
        """The model of each worker that is here. While absences are not trusted, those that have
        one keep it."""
        turns = Turns(
            models={
                model: Turn(
                    is_wanted=model in snapshot.wanted,
                    since_s=snapshot.plan(model).age_s,
                    served_s=snapshot.served_s.get(model) if snapshot.plan(model).stages else None,
                )
                for model in snapshot.workers
            },
            offers=_offers(snapshot),
            fits=snapshot.fits,
            scale=self._times.poll_s / Times().poll_s,
        )
        held = {worker: model for model, plan in snapshot.plans.items() for worker in plan.stages}
        assignment = turns.assign(held)
        if self._answered_s < self._trusts_after_s:
            assignment |= {
                worker: held[worker]
                for worker in assignment
                if held.get(worker) in turns.offers[worker]
            }
        return assignment

    def _deployment(
        self, model: str, snapshot: FleetSnapshot, assignment: Mapping[str, str]
    ) -> Deployment | None:
        """What should run of a model from now on, or None if nothing changes."""
        plan = snapshot.plan(model)
        members = {
            worker: each
            for worker, each in snapshot.workers.get(model, {}).items()
            if assignment[worker] == model
        }
        remaining = {
            worker: place
            for worker, place in plan.stages.items()
            if assignment.get(worker, model) == model
        }
        if plan.version and self._answered_s < self._trusts_after_s:
            return None
        may_improve = plan.age_s > COOL_DOWN_POLLS * self._times.poll_s
        state = (
            plan.version,
            may_improve,
            frozenset((worker, dump(each.profile)) for worker, each in members.items()),
        )
        if not plan.version and self._is_unsettled(members, snapshot.joining.get(model, math.inf)):
            return None
        if self._seen.get(model) == state and len(remaining) == len(plan.stages):
            return None
        current = Deployment(split=plan.split, stages=remaining, tokens_per_s=plan.tokens_per_s)
        replanned = (
            self._replanned(model, snapshot, members, current, may_improve) if members else None
        )
        if replanned is not None:
            return replanned
        self._seen[model] = state
        return current if len(remaining) < len(plan.stages) else None

    @staticmethod
    def _replanned(
        model: str,
        snapshot: FleetSnapshot,
        members: Collection[str],
        current: Deployment,
        may_improve: bool,
    ) -> Deployment | None:
        try:
            return snapshot.planner(model, members).replan(
                current if current.stages else None, may_improve=may_improve
            )
        except Invalid as error:
            log.warning("fleet cannot be planned", model=model, problem=error.problem)
        except Exception:
            log.exception("fleet cannot be planned", model=model)
        return None

    def _is_unsettled(self, members: Mapping[str, FleetWorker], joining_s: float) -> bool:
        """Whether more workers may come that the first plan should count."""
        newest_s = min((member.here_s for member in members.values()), default=math.inf)
        return (
            newest_s < SETTLE_POLLS * self._times.poll_s
            or joining_s < PATIENCE_POLLS * self._times.poll_s
        )

    def _store(self, snapshot: FleetSnapshot, changes: Mapping[str, Deployment]) -> None:
        """All of them, unless another coordinator has changed a plan since."""
        with self._database.begin() as connection:
            fleets.lock_plans(connection)
            if _versions(fleets.all_plans(connection)) != _versions(snapshot.plans):
                return
            for model, deployment in changes.items():
                fleets.store_plan(
                    connection,
                    model,
                    version=snapshot.plan(model).version,
                    split=deployment.split,
                    stages=deployment.stages,
                    tokens_per_s=deployment.tokens_per_s,
                )
        for model, deployment in changes.items():
            version = snapshot.plan(model).version + 1
            num = len(deployment.stages)
            log.info(
                "fleet planned", model=model, version=version, split=str(deployment), workers=num
            )


def _problem(worker: FleetWorker) -> str | None:
    """Why no plan can count this worker, or None. Its release or its measuring may be at fault: the
    others go on."""
    try:
        profile_of(worker.profile, "profile")
        msgspec.convert(worker.shapes, ModelCosts)
    except (Invalid, msgspec.MsgspecError) as error:
        return str(error)
    return None


def _offers(snapshot: FleetSnapshot) -> dict[str, list[str]]:
    """The models of each worker."""
    offers: dict[str, list[str]] = {}
    for model, workers in snapshot.workers.items():
        for worker in workers:
            offers.setdefault(worker, []).append(model)
    return offers


def _versions(plans: Mapping[str, FleetPlan]) -> dict[str, int]:
    return {model: plan.version for model, plan in plans.items()}
