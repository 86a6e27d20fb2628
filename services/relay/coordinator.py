"""The coordinator: gives the workers of each fleet their stages, and others when workers come and go. Every relay has
one; of several that plan at once one succeeds. The rules are in shardline.planner.fleet_planner."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import structlog

from services.relay.loop import Loop, LoopContext
from shardline.clock import lease_clock_s
from shardline.errors import Invalid
from shardline.planner import DeviceProfile, ModelCosts, Workload
from shardline.planner.fleet_planner import Deployment, FleetPlanner
from shardline.store import fleets
from shardline.store.encoding import dump
from shardline.store.fleets import FleetPlan, FleetWorker

log = structlog.get_logger(__name__)

STALL = 1 / 3
"""Part of a job's lease: after a longer silence of Postgres, or of this relay, workers get time to beat again."""
SETTLE_POLLS = 3
"""A fleet gets its first plan when nobody has joined for so many polls: workers of one start come one by one."""
COOL_DOWN_POLLS = 60
"""Between two new cuts that only make a fleet faster."""


class Coordinator(Loop):
    """Looks at every fleet once in a poll."""

    def __init__(self, context: LoopContext) -> None:
        super().__init__("coordinator", context.metrics.errors)
        self._database = context.database
        self._poll_s, self._lease_s = context.times.poll_s, context.times.lease_s
        self._answered_s = -math.inf
        """The last answer of Postgres, by the lease clock."""
        self._trusts_after_s = math.inf
        """Until then a worker that seems to be gone may only have been unable to beat."""
        self._seen: dict[str, object] = {}
        """By model: what a look saw that changed nothing. The same need not be planned again, which takes up to a
        second."""

    def turn(self) -> float:
        """Plan for each fleet that needs it."""
        with self._database.begin() as connection:
            models = fleets.fleets(connection)
        now_s = lease_clock_s()
        if now_s - self._answered_s > STALL * self._lease_s:
            self._trusts_after_s = now_s + fleets.LEASES * self._lease_s
        self._answered_s = now_s
        for model in models:
            self._look(model)
        return self._poll_s

    def _look(self, model: str) -> None:
        with self._database.begin() as connection:
            members, plan = fleets.workers_of(connection, model), fleets.plan_of(connection, model)
        if plan.version and self._answered_s < self._trusts_after_s:
            return
        may_improve = plan.age_s > COOL_DOWN_POLLS * self._poll_s
        seen = plan.version, may_improve, frozenset((each.worker, dump(each.profile)) for each in members)
        if not members or self._is_unsettled(members, plan) or self._seen.get(model) == seen:
            return
        try:
            deployment = self._deployment(members, plan, may_improve=may_improve)
        except Invalid as error:
            log.warning("fleet cannot be planned", model=model, problem=error.problem)
            deployment = None
        if deployment is None:
            self._seen[model] = seen
            return
        with self._database.begin() as connection:
            is_ours = fleets.store_plan(
                connection,
                model,
                version=plan.version,
                split=deployment.split,
                stages=deployment.stages,
                tokens_per_s=deployment.tokens_per_s,
            )
        if is_ours:
            split = ",".join(f"{first}-{stop - 1}" for first, stop in deployment.split)
            log.info("fleet planned", model=model, version=plan.version + 1, split=split, workers=len(members))

    def _is_unsettled(self, members: Sequence[FleetWorker], plan: FleetPlan) -> bool:
        """Whether more workers may come that the first plan should have counted."""
        return not plan.version and min(member.here_s for member in members) < SETTLE_POLLS * self._poll_s

    @staticmethod
    def _deployment(members: Sequence[FleetWorker], plan: FleetPlan, *, may_improve: bool) -> Deployment | None:
        """What should run from now on, or None if nothing changes. Raises Invalid if they do not hold the model."""
        # All workers of a model have one config: whose shapes are read does not matter.
        model = msgspec.convert(members[0].shapes, ModelCosts)
        profiles = {member.worker: msgspec.convert(member.profile, DeviceProfile) for member in members}
        now = Deployment(split=plan.split, stages=plan.stages) if plan.version else None
        return FleetPlanner(model, profiles, Workload()).replan(now, may_improve=may_improve)
