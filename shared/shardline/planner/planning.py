"""Makes plans: from a model, measured devices and a load to the best stages and those that come next."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardline.errors import Invalid
from shardline.planner.device_profile import DeviceProfile
from shardline.planner.fleet import Fleet, neighbors, share_memory
from shardline.planner.model_costs import WEIGHT_BYTES, ModelCosts
from shardline.planner.plan import Plan, Plans
from shardline.planner.prediction import Assigned, Predictor
from shardline.planner.sites import sites
from shardline.planner.workload import Goal, Workload
from shardline.split import even_split

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

    Several profiles of one device are dtypes to choose from; stages pair only if their activations have one dtype.
    Raises Invalid if no plan fits, or a profile does not know the model.
    """
    predictor, profiles = Predictor(model, workload), share_memory(profiles)
    ranking = _Ranking(predictor, goal)
    for family in (family for site in sites(profiles) for family in _families(site)):
        for shape in Fleet.of(predictor, family).shapes(num_stages, replicas):
            if goal is Goal.THROUGHPUT:
                ranking.add(shape.fastest(ranking.busy_s(shape.replicas)))
            elif shape.num_stages == (num_stages or 1):  # it finds the number of stages by itself
                ranking.add(shape.first())
    if not ranking.plans:
        _refuse(model, profiles, workload)
    ranking.improve()
    best, *others = ranking.plans[: 1 + NUM_OTHERS]
    return Plans(goal=goal, best=best, others=tuple(others), even=_even(predictor, profiles, best))


def make_plans_that_fit(
    model: ModelCosts, profiles: Sequence[DeviceProfile], workload: Workload, *, num_stages: int | None = None
) -> Plans:
    """As make_plans for throughput, of one pipeline if the number of stages is given; with fewer requests at a time
    where the devices do not hold the KV of all. Raises Invalid if they do not hold the model with one."""
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

    def __init__(self, predictor: Predictor, goal: Goal) -> None:
        self._predictor, self._goal = predictor, goal
        self._found: dict[tuple[object, ...], tuple[Plan, Sequence[Assigned]]] = {}

    def add(self, stages: Sequence[Assigned] | None) -> None:
        """Adds what fits."""
        if stages is None:
            return
        key = tuple((each.devices[0].dtype, each.first, each.stop, _names(each)) for each in stages)
        if key not in self._found and self._predictor.fits(stages):
            self._found[key] = self._predictor.predict(stages), stages

    def improve(self) -> None:
        """Goes from the best to its best neighbor, as long as that is better: the search knows no links."""
        for _ in range(MAX_CLIMBS):
            before = self.best
            for each in neighbors(self.stages(before)):
                self.add(each)
            if self.best is before:
                return

    @property
    def plans(self) -> list[Plan]:
        """All of them."""
        return sorted((plan for plan, _ in self._found.values()), key=lambda plan: plan.seconds(self._goal))

    @property
    def best(self) -> Plan:
        """The first."""
        return self.plans[0]

    def stages(self, plan: Plan) -> Sequence[Assigned]:
        """What a plan was predicted of."""
        return next(stages for each, stages in self._found.values() if each is plan)

    def busy_s(self, replicas: int) -> float:
        """A stage that is busy for longer, with so many replicas, is in none of the first plans."""
        plans = self.plans
        if len(plans) <= NUM_OTHERS:
            return float("inf")
        load = self._predictor.load(replicas)
        return load.concurrency * load.output * replicas / plans[NUM_OTHERS].tokens_per_s


def _names(stage: Assigned) -> tuple[tuple[str, str], ...]:
    return tuple((device.host, device.device) for device in stage.devices)


def _families(profiles: Sequence[DeviceProfile]) -> list[list[DeviceProfile]]:
    """Profiles whose stages may stand in one pipeline."""
    by_dtype: dict[str, list[DeviceProfile]] = defaultdict(list)
    for profile in profiles:
        by_dtype[profile.activation_dtype].append(profile)
    return list(by_dtype.values())


def _even(predictor: Predictor, profiles: Sequence[DeviceProfile], best: Plan) -> Plan | None:
    """The even split over the best plan's devices, in the order in which they were given."""
    used = [(name.host, name.device, stage.dtype) for stage in best.stages for name in stage.devices]
    given = [profile for profile in profiles if (profile.host, profile.device, profile.dtype) in used]
    layers = even_split(len(predictor.model.layers), len(best.stages))
    replicas, num = best.replicas, len(best.stages)
    stages = [
        Assigned(tuple(given[replica * num + place] for replica in range(replicas)), part.start, part.stop)
        for place, part in enumerate(layers)
    ]
    return predictor.predict(stages) if predictor.fits(stages) else None


def _refuse(model: ModelCosts, profiles: Sequence[DeviceProfile], workload: Workload) -> None:
    least = min((WEIGHT_BYTES[profile.dtype] for profile in profiles), default=0)
    raise Invalid(
        "--devices",
        f"{len(profiles)} devices do not hold the model ({model.num_weights * least / 2**20:,.0f} MiB) and the KV of "
        f"{workload.kv_tokens:,} tokens",
        "Give more devices, a smaller dtype, or a smaller load",
    )
