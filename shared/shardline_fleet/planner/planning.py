"""Makes plans: from a model, measured devices and a load to the best stages and those that come
next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardline.base.errors import Invalid
from shardline.contract.fleet.split import even_split
from shardline_costs.device_profile import DeviceProfile, check_profiles
from shardline_costs.model_costs import ModelCosts
from shardline_costs.plan import Plan, Plans
from shardline_costs.prediction import Predictor, StageAssignment
from shardline_costs.workload import Goal, Workload
from shardline_fleet.planner.boundaries import apart, bounds
from shardline_fleet.planner.fleet import (
    Fleet,
    dtype_groups,
    moved,
    neighbors,
    reordered,
    share_memory,
)
from shardline_fleet.planner.load_sharing import LoadSharing
from shardline_fleet.planner.partitions import Partitions
from shardline_fleet.planner.zones import zones

MAX_CLIMBS = 16
MAX_REORDERED = 4
"""Stages of a pipeline of which other orders are tried."""
NUM_OTHERS = 3
"""Plans that are shown behind the best."""
Pipeline = Sequence[StageAssignment]


def make_plans(
    model: ModelCosts,
    profiles: Sequence[DeviceProfile],
    workload: Workload,
    goal: Goal = Goal.THROUGHPUT,
    *,
    num_stages: int | None = None,
    replicas: int | None = None,
) -> Plans:
    """The best plans over these devices, some of which may be left out.

    Several profiles of one device are dtypes and ranks to choose from; stages pair only if their
    activations have one dtype. Raises Invalid if no plan fits, or a profile does not know the model
    or is none that a device has.
    """
    check_profiles(profiles)
    profiles = share_memory(profiles)
    sharing = LoadSharing(model, workload)
    ranking = _Ranking(sharing, goal)
    for group in (group for zone in zones(profiles) for group in dtype_groups(zone)):
        ranking.add_shapes(Fleet.of(group), num_stages, replicas)
    if goal is Goal.THROUGHPUT and num_stages is None and replicas is None:
        start = ranking.best[1][0] if ranking.plans else None
        for pipelines in Partitions(sharing, profiles).best(start, 1 + NUM_OTHERS):
            if (found := apart(sharing, pipelines)) is not None:
                ranking.add(found)
    if not ranking.plans:
        _refuse(model, profiles, workload)
    ranking.improve()
    best, *others = ranking.plans[: 1 + NUM_OTHERS]
    return Plans(goal=goal, best=best, others=tuple(others), even=_even(sharing, profiles, best))


def make_plans_that_fit(
    model: ModelCosts,
    profiles: Sequence[DeviceProfile],
    workload: Workload,
    *,
    num_stages: int | None = None,
) -> Plans:
    """Plans as make_plans for throughput, of one pipeline if the number of stages is given; with
    fewer requests at a time where the devices do not hold the KV of all. Raises Invalid if they do
    not hold the model with one."""
    replicas = None if num_stages is None else 1
    for load in smaller_loads(workload):
        try:
            return make_plans(model, profiles, load, num_stages=num_stages, replicas=replicas)
        except Invalid:
            if load.concurrency == 1:
                raise
    raise AssertionError("the last load has one request")


def smaller_loads(workload: Workload) -> Iterator[Workload]:
    """Yields this load, then with a quarter of the requests at a time, down to one."""
    yield workload
    if workload.concurrency > 1:
        yield from smaller_loads(replace(workload, concurrency=max(1, workload.concurrency // 4)))


class _Ranking:
    """Plans, the best first."""

    def __init__(self, sharing: LoadSharing, goal: Goal) -> None:
        self._sharing = sharing
        self._goal = goal
        self._found: dict[tuple[object, ...], tuple[Plan, Sequence[Pipeline]]] = {}

    def add_shapes(self, fleet: Fleet, num_stages: int | None, replicas: int | None) -> None:
        """Adds the best plan of each shape: one pipeline and its replicas."""
        for num in [replicas] if replicas else range(1, fleet.num_devices + 1):
            predictor = self._sharing.equal(num)
            for shape in fleet.shapes(num, len(self._sharing.model.layers), num_stages):
                if self._goal is Goal.THROUGHPUT:
                    stages = shape.fastest(predictor, self._busy_s(predictor, num))
                # it finds the number of stages by itself
                elif shape.num_stages == (num_stages or 1):
                    stages = shape.first(predictor)
                else:
                    stages = None
                if stages is not None:
                    self.add([stages])

    def add(self, pipelines: Sequence[Pipeline]) -> None:
        """Adds what fits."""
        key = _key(pipelines)
        if key not in self._found and (plan := self._sharing.predict(pipelines)) is not None:
            self._found[key] = plan, pipelines

    def improve(self) -> None:
        """Goes from the best to its best neighbor, as long as that is better: the search knows no
        links, nor that in some steps one stage is the slowest and in others another. So other
        orders of few stages are tried too."""
        for _ in range(MAX_CLIMBS):
            before = self.best
            self._add_neighbors(*before)
            if self.best is before:
                self._add_orders(*before)
            if self.best is before:
                return

    def _add_orders(self, plan: Plan, pipelines: Sequence[Pipeline]) -> None:
        """Adds those with two devices of one short pipeline exchanged, and layers moved while that
        helps."""
        for place, (stages, planned) in enumerate(zip(pipelines, plan.pipelines, strict=True)):
            if len(stages) <= MAX_REORDERED:
                predictor = self._sharing.predictor(planned.concurrency)
                taken = {
                    bound for each in pipelines if each is not stages for bound in bounds(each)
                }
                for order in reordered(stages):
                    self._add_changed(plan, pipelines, place, _balanced(predictor, order), taken)

    def _add_neighbors(self, plan: Plan, pipelines: Sequence[Pipeline]) -> None:
        """Those with one pipeline changed, which keeps its share of the load."""
        for place, stages in enumerate(pipelines):
            taken = {bound for each in pipelines if each is not stages for bound in bounds(each)}
            for neighbor in neighbors(stages):
                self._add_changed(plan, pipelines, place, neighbor, taken)

    def _add_changed(
        self,
        plan: Plan,
        pipelines: Sequence[Pipeline],
        place: int,
        stages: Pipeline,
        taken: set[int],
    ) -> None:
        """Adds the plan with other stages of the pipeline at this place, if they fit and none
        begins where another pipeline's does."""
        predictor = self._sharing.predictor(plan.pipelines[place].concurrency)
        changed = [*pipelines[:place], stages, *pipelines[place + 1 :]]
        key = _key(changed)
        if key not in self._found and not taken & bounds(stages) and predictor.fits(stages):
            predicted = [*plan.pipelines]
            predicted[place] = predictor.predict(stages)
            self._found[key] = Plan.of(predicted, self._sharing.workload.concurrency), changed

    @property
    def best(self) -> tuple[Plan, Sequence[Pipeline]]:
        """The first, with its stages."""
        return min(self._found.values(), key=lambda found: found[0].seconds(self._goal))

    @property
    def plans(self) -> list[Plan]:
        """All of them."""
        return sorted(
            (plan for plan, _ in self._found.values()), key=lambda plan: plan.seconds(self._goal)
        )

    def _busy_s(self, predictor: Predictor, replicas: int) -> float:
        """Returns a limit: a stage that is busy for longer, with `replicas` replicas, is in none of
        the first plans."""
        plans = self.plans
        return predictor.busy_s(
            plans[NUM_OTHERS].tokens_per_s / replicas if len(plans) > NUM_OTHERS else 0.0
        )


def _balanced(predictor: Predictor, stages: Pipeline) -> Pipeline:
    """The same devices in the same order, with layers moved one by one as long as that makes it
    faster."""
    speed = predictor.predict(stages).tokens_per_s
    while True:
        speeds = [
            (predictor.predict(each).tokens_per_s, each)
            for each in moved(stages)
            if predictor.fits(each)
        ]
        faster = max(speeds, key=lambda found: found[0], default=(0.0, stages))
        if faster[0] <= speed:
            return stages
        speed, stages = faster


def _key(pipelines: Sequence[Pipeline]) -> tuple[object, ...]:
    """Equal for equal pipelines, in whatever order."""
    return tuple(
        sorted(
            tuple((each.profile.way, *each[1:], _names(each)) for each in stages)
            for stages in pipelines
        )
    )


def _names(stage: StageAssignment) -> tuple[tuple[str, str], ...]:
    return tuple((device.host, device.device) for device in stage.devices)


def _even(sharing: LoadSharing, profiles: Sequence[DeviceProfile], best: Plan) -> Plan | None:
    """Even splits over the devices of the best plan's pipelines, in the order in which they were
    given."""
    pipelines = []
    for planned in best.pipelines:
        used = [
            (name.host, name.device, (stage.dtype, stage.ranks))
            for stage in planned.stages
            for name in stage.devices
        ]
        given = [
            profile for profile in profiles if (profile.host, profile.device, profile.way) in used
        ]
        layers = even_split(len(sharing.model.layers), len(planned.stages))
        num = len(planned.stages)
        pipelines.append(
            [
                StageAssignment(tuple(given[place::num]), part.start, part.stop)
                for place, part in enumerate(layers)
            ]
        )
    return sharing.predict(pipelines)


def _refuse(model: ModelCosts, profiles: Sequence[DeviceProfile], workload: Workload) -> None:
    least = min((model.weight_bytes(profile.dtype) for profile in profiles), default=0)
    raise Invalid(
        "--devices",
        f"{len(profiles)} devices do not hold the model "
        f"({model.num_weights * least / 2**20:,.0f} MiB) "
        f"and the KV of {workload.kv_tokens:,} tokens",
        "Give more devices, a smaller dtype, or a smaller load",
    )
