"""The coordinator: gives the workers of each fleet their model and their stages, and others when workers come and go or
jobs ask for another model. Every relay has one; of several that plan at once one succeeds. The rules are in
shardline_fleet.planner.fleet_planner and shardline_fleet.planner.turns."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec
import structlog
from sqlalchemy import Connection

from services.relay.loop import Loop, LoopContext
from shardline.base.clock import lease_clock_s
from shardline.base.config import Times
from shardline.base.errors import Invalid
from shardline.store import fleets
from shardline.store.connection.encoding import dump
from shardline.store.fleets import NO_PLAN, FleetPlan, FleetWorker
from shardline_fleet.planner import ModelCosts, Workload
from shardline_fleet.planner.device_profile import profile_of
from shardline_fleet.planner.fleet_planner import Deployment, FleetPlanner
from shardline_fleet.planner.turns import Turn, Turns

log = structlog.get_logger(__name__)

STALL = 1 / 3
"""Part of a job's lease: after a longer silence of Postgres, or of this relay, workers get time to beat again."""
SETTLE_POLLS = 3
"""A fleet gets its first plan when nobody has joined for so many polls: workers of one start come one by one."""
PATIENCE_POLLS = 120
"""So long its first plan waits for workers that are announced: they measure their devices."""
COOL_DOWN_POLLS = 60
"""Between two new cuts that only make a fleet faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What Postgres knows at one moment of all fleets."""

    workers: Mapping[str, Mapping[str, FleetWorker]]
    """By model and name: those that are here and may serve the model."""
    unusable: Mapping[str, str]
    """By name: why a worker that is here is in no plan."""
    coming: Mapping[str, float]
    """By model: seconds since the newest worker that has not joined yet was announced."""
    plans: Mapping[str, FleetPlan]
    wanted: Collection[str]
    served_s: Mapping[str, float]

    @classmethod
    def of(cls, connection: Connection) -> Sight:
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
            coming=fleets.coming(connection),
            plans=fleets.all_plans(connection),
            wanted=fleets.wanted(connection, models) if len(models) > 1 else models,
            served_s=fleets.served(connection) if len(models) > 1 else {},
        )

    def plan(self, model: str) -> FleetPlan:
        """The plan of a model, which may have none."""
        return self.plans.get(model, NO_PLAN)

    def planner(self, model: str, workers: Collection[str]) -> FleetPlanner:
        """Of a model for some of its workers."""
        members = self.workers[model]
        # All workers of a model have one config: whose shapes are read does not matter.
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
        except Exception:  # noqa: BLE001 (one fleet's figures must not stop the others; `_replanned` tells)
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
        """By model: what a look saw that changed nothing. The same need not be planned again, which takes up to a
        second."""
        self._told: Mapping[str, str] = {}
        """The workers that the log knows to be in no plan."""

    def turn(self) -> float:
        """Plan for each fleet that needs it."""
        with self._database.begin() as connection:
            sight = Sight.of(connection)
        now_s = lease_clock_s()
        if now_s - self._answered_s > STALL * self._times.lease_s:
            self._trusts_after_s = now_s + fleets.LEASES * self._times.lease_s
        self._answered_s = now_s
        self._tell_unusable(sight.unusable)
        given = self._given(sight)
        changes = {}
        for model in sorted({*sight.workers, *sight.plans}):
            deployment = self._deployment(model, sight, given)
            if deployment is not None:
                changes[model] = deployment
        if changes:
            self._store(sight, changes)
        return self._times.poll_s

    def _tell_unusable(self, unusable: Mapping[str, str]) -> None:
        for worker, problem in unusable.items():
            if self._told.get(worker) != problem:
                log.warning("a worker is in no plan", worker=worker, problem=problem)
        self._told = unusable

    def _given(self, sight: Sight) -> dict[str, str]:
        """The model of each worker that is here. While absences are not trusted, those that have one keep it."""
        turns = Turns(
            models={
                model: Turn(
                    is_wanted=model in sight.wanted,
                    since_s=sight.plan(model).age_s,
                    served_s=sight.served_s.get(model) if sight.plan(model).stages else None,
                )
                for model in sight.workers
            },
            offers=_offers(sight),
            fits=sight.fits,
            scale=self._times.poll_s / Times().poll_s,
        )
        held = {worker: model for model, plan in sight.plans.items() for worker in plan.stages}
        given = turns.assign(held)
        if self._answered_s < self._trusts_after_s:
            given |= {worker: held[worker] for worker in given if held.get(worker) in turns.offers[worker]}
        return given

    def _deployment(self, model: str, sight: Sight, given: Mapping[str, str]) -> Deployment | None:
        """What should run of a model from now on, or None if nothing changes."""
        plan = sight.plan(model)
        own = {worker: each for worker, each in sight.workers.get(model, {}).items() if given[worker] == model}
        kept = {worker: place for worker, place in plan.stages.items() if given.get(worker, model) == model}
        if plan.version and self._answered_s < self._trusts_after_s:
            return None
        may_improve = plan.age_s > COOL_DOWN_POLLS * self._times.poll_s
        seen = plan.version, may_improve, frozenset((worker, dump(each.profile)) for worker, each in own.items())
        if not plan.version and self._is_unsettled(own, sight.coming.get(model, math.inf)):
            return None
        if self._seen.get(model) == seen and len(kept) == len(plan.stages):
            return None
        now = Deployment(split=plan.split, stages=kept, tokens_per_s=plan.tokens_per_s)
        then = self._replanned(model, sight, own, now, may_improve=may_improve) if own else None
        if then is not None:
            return then
        self._seen[model] = seen
        return now if len(kept) < len(plan.stages) else None

    @staticmethod
    def _replanned(
        model: str, sight: Sight, own: Collection[str], now: Deployment, *, may_improve: bool
    ) -> Deployment | None:
        try:
            return sight.planner(model, own).replan(now if now.stages else None, may_improve=may_improve)
        except Invalid as error:
            log.warning("fleet cannot be planned", model=model, problem=error.problem)
        except Exception:
            log.exception("fleet cannot be planned", model=model)
        return None

    def _is_unsettled(self, own: Mapping[str, FleetWorker], coming_s: float) -> bool:
        """Whether more workers may come that the first plan should count."""
        newest_s = min((member.here_s for member in own.values()), default=math.inf)
        return newest_s < SETTLE_POLLS * self._times.poll_s or coming_s < PATIENCE_POLLS * self._times.poll_s

    def _store(self, sight: Sight, changes: Mapping[str, Deployment]) -> None:
        """All of them, unless another coordinator has changed a plan since."""
        with self._database.begin() as connection:
            fleets.lock_plans(connection)
            if _versions(fleets.all_plans(connection)) != _versions(sight.plans):
                return
            for model, deployment in changes.items():
                fleets.store_plan(
                    connection,
                    model,
                    version=sight.plan(model).version,
                    split=deployment.split,
                    stages=deployment.stages,
                    tokens_per_s=deployment.tokens_per_s,
                )
        for model, deployment in changes.items():
            version, num = sight.plan(model).version + 1, len(deployment.stages)
            log.info("fleet planned", model=model, version=version, split=str(deployment), workers=num)


def _problem(worker: FleetWorker) -> str | None:
    """Why no plan can count this worker, or None. Its release or its measuring may be at fault: the others go on."""
    try:
        profile_of(worker.profile, "profile")
        msgspec.convert(worker.shapes, ModelCosts)
    except (Invalid, msgspec.MsgspecError) as error:
        return str(error)
    return None


def _offers(sight: Sight) -> dict[str, list[str]]:
    """The models of each worker."""
    offers: dict[str, list[str]] = {}
    for model, workers in sight.workers.items():
        for worker in workers:
            offers.setdefault(worker, []).append(model)
    return offers


def _versions(plans: Mapping[str, FleetPlan]) -> dict[str, int]:
    return {model: plan.version for model, plan in plans.items()}
