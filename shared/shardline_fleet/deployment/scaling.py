"""How many workers a load needs: the planner's speed of ever larger fleets. Pure; knows no
server."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from shardline.base.errors import Invalid
from shardline_costs.device_profile import DeviceProfile, check_profiles
from shardline_costs.model_costs import ModelCosts
from shardline_costs.plan import Plan
from shardline_costs.workload import Workload
from shardline_fleet.planner.planning import make_plans_that_fit

MAX_WORKERS = 64


class FleetSize(msgspec.Struct, frozen=True, kw_only=True):
    """A number of workers, and what is predicted of them."""

    workers: int
    split: str
    replicas: int
    tokens_per_s: float
    """Output, with every seat taken."""
    used: float
    """Share of it that the load takes; above 1 the queue grows."""


class Scaling:
    """Fleets of a model's workers: those that are here, the fastest first, then more of the kind
    that most are of."""

    def __init__(
        self, model: ModelCosts, here: Sequence[DeviceProfile], workload: Workload
    ) -> None:
        """`workload`: jobs of the usual size, as many at a time as one pipeline has seats. Raises
        Invalid for a profile that no device has."""
        check_profiles(here)
        self._model = model
        self._workload = workload
        self._here = sorted(here, key=_layer_s)
        kinds = Counter((each.hardware, each.way) for each in here)
        (usual, _), *_ = kinds.most_common(1)
        self._usual = next(each for each in here if (each.hardware, each.way) == usual)

    def size(self, num: int, tokens_per_s: float) -> FleetSize | None:
        """Returns what `num` workers do with a load of `tokens_per_s` output tokens/s; None if they
        do not hold the model."""
        try:
            plan = self._plan(num)
        except Invalid:
            return None
        return FleetSize(
            workers=num,
            split=plan.split,
            replicas=plan.replicas,
            tokens_per_s=plan.tokens_per_s,
            used=tokens_per_s / plan.tokens_per_s,
        )

    def needed(
        self, tokens_per_s: float, share: float, at_most: int = MAX_WORKERS
    ) -> FleetSize | None:
        """The fewest workers of which a load takes at most this share; None if `at_most` are too
        few.

        More workers are never slower, since a plan may leave some out: so the number is found by
        halves.
        """
        numbers = range(1, at_most + 1)
        place = bisect_left(
            numbers, True, key=lambda num: self._is_enough(self.size(num, tokens_per_s), share)
        )
        return self.size(numbers[place], tokens_per_s) if place < at_most else None

    @staticmethod
    def _is_enough(size: FleetSize | None, share: float) -> bool:
        return size is not None and size.used <= share

    def _plan(self, num: int) -> Plan:
        profiles = self._here[:num]
        profiles += [
            # A further one has its own memory: it comes with a container's limit, or on a further
            # host.
            msgspec.structs.replace(self._usual, device=f"further {place}", host_memory=None)
            for place in range(num - len(profiles))
        ]
        # First the seats that a pipeline on each worker would have; then those of the plan's
        # pipelines.
        while True:
            plan = make_plans_that_fit(self._model, profiles, self._seated(num)).best
            if plan.replicas >= num:
                return plan
            num = plan.replicas

    def _seated(self, pipelines: int) -> Workload:
        return replace(self._workload, concurrency=self._workload.concurrency * pipelines)


def _layer_s(profile: DeviceProfile) -> float:
    return sum(times.rows[-1][1] for times in profile.layers.values())
