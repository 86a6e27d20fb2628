"""Makes plans: from a model, measured devices and a load to the best stages and those that come
next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from shardline.base.errors import Invalid
from shardline.contract.fleet.split import even_split
from shardline_fleet.planner.chains import fastest, soonest
from shardline_fleet.planner.device_profile import DeviceProfile, check_profiles
from shardline_fleet.planner.devices import DeviceKinds, share_memory
from shardline_fleet.planner.load_sharing import LoadSharing
from shardline_fleet.planner.model_costs import ModelCosts
from shardline_fleet.planner.moves import Pipeline, apart, bounds, neighbors, reordered
from shardline_fleet.planner.partitions import Partitions
from shardline_fleet.planner.plan import Plan, Plans
from shardline_fleet.planner.prediction import Predictor, StageAssignment
from shardline_fleet.planner.workload import Goal, Workload

MAX_CLIMBS = 16
NUM_OTHERS = 3
"""Plans that are shown behind the best."""


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
    kinds = DeviceKinds.of(profiles)
    # Of equal parts as many as there can be: more are never slower.
    parts = {kinds.part(num): num for num in range(1, max(kinds.counts, default=0) + 1)}
    for num in [replicas] if replicas else parts.values():
        ranking.add_replicas(kinds, num, num_stages)
    if goal is Goal.THROUGHPUT and num_stages is None and replicas is None:
        start = ranking.best[1][0] if ranking.found else []
        for pipelines in Partitions(sharing, profiles).best(start, 1 + NUM_OTHERS):
            if (found := apart(sharing, pipelines)) is not None:
                ranking.add(found)
    if not ranking.found:
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
    """Plans with their stages, as they are found."""

    def __init__(self, sharing: LoadSharing, goal: Goal) -> None:
        self._sharing = sharing
        self._goal = goal
        self.found: dict[tuple[object, ...], tuple[Plan, Sequence[Pipeline]]] = {}

    @property
    def best(self) -> tuple[Plan, Sequence[Pipeline]]:
        """The first, with its stages."""
        return min(self.found.values(), key=lambda found: found[0].seconds(self._goal))

    @property
    def plans(self) -> list[Plan]:
        """All of them, the best first."""
        plans = (plan for plan, _ in self.found.values())
        return sorted(plans, key=lambda plan: plan.seconds(self._goal))

    def add_replicas(self, kinds: DeviceKinds, replicas: int, num_stages: int | None) -> None:
        """Adds the best pipeline of which there can be this many replicas."""
        part = kinds.part(replicas)
        predictor = self._sharing.equal(replicas)
        if self._goal is Goal.LATENCY:
            stages = soonest(predictor, kinds.first(part))
        else:
            least = self.best[0].tokens_per_s / replicas if len(self.found) > NUM_OTHERS else 0.0
            stages = fastest(predictor, kinds.first(part), num_stages, least)
        if stages:
            self.add([kinds.dealt(stages, part, replicas, tuple(0 for _ in part))])

    def add(self, pipelines: Sequence[Pipeline]) -> None:
        """Adds what fits."""
        key = _key(pipelines)
        if key not in self.found and (plan := self._sharing.predict(pipelines)) is not None:
            self.found[key] = plan, pipelines

    def improve(self) -> None:
        """Goes from the best to its best neighbor, as long as that is better: the search knows no
        links, nor that in some steps one stage is the slowest and in others another. So other
        orders of few stages are tried too."""
        for _ in range(MAX_CLIMBS):
            before = self.best
            self._add_changed(*before, lambda _, stages: neighbors(stages))
            if self.best is before:
                self._add_changed(*before, self._reordered)
            if self.best is before:
                return

    def _add_changed(
        self,
        plan: Plan,
        pipelines: Sequence[Pipeline],
        change: Callable[[Predictor, Pipeline], Iterator[Pipeline]],
    ) -> None:
        """Adds those with one pipeline changed, which keeps its share of the load, if it fits and
        none of its stages begins where another pipeline's does."""
        for place, stages in enumerate(pipelines):
            predictor = self._sharing.predictor(plan.pipelines[place].concurrency)
            others = [*pipelines[:place], *pipelines[place + 1 :]]
            taken = {bound for other in others for bound in bounds(other)}
            for changed in change(predictor, stages):
                then = [*pipelines[:place], changed, *pipelines[place + 1 :]]
                key = _key(then)
                if key in self.found or taken & bounds(changed) or not predictor.fits(changed):
                    continue
                predicted = [*plan.pipelines]
                predicted[place] = predictor.predict(changed)
                concurrency = self._sharing.workload.concurrency
                self.found[key] = Plan.of(predicted, concurrency), then

    def _reordered(self, predictor: Predictor, stages: Pipeline) -> Iterator[Pipeline]:
        return reordered(predictor, stages, self._seconds)

    def _seconds(self, predictor: Predictor, stages: Pipeline) -> float:
        return Plan.of([predictor.predict(stages)], predictor.load.concurrency).seconds(self._goal)


def _key(pipelines: Sequence[Pipeline]) -> tuple[object, ...]:
    """Equal for equal pipelines, in whatever order."""
    return tuple(
        sorted(
            tuple((each.profile.way, *each[1:], each.names) for each in stages)
            for stages in pipelines
        )
    )


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
        given = [each for each in profiles if (each.host, each.device, each.way) in used]
        num = len(planned.stages)
        layers = even_split(len(sharing.model.layers), num)
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
