"""How pipelines side by side share a load, and what is predicted of all together. Knows no search.

They take requests from one queue, and their heads have equal seats: each replica runs the same
number of requests, or those that its memory holds if they are fewer; the others run the rest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from shardline.base.rounding import ceil_div
from shardline_costs.model_costs import ModelCosts
from shardline_costs.plan import Plan
from shardline_costs.prediction import Predictor, StageAssignment
from shardline_costs.workload import Workload


@dataclass(frozen=True, slots=True)
class LoadSharing:
    """A model under a load, which all pipelines share."""

    model: ModelCosts
    workload: Workload
    _predictors: dict[int, Predictor] = field(default_factory=dict, repr=False, compare=False)

    def predictor(self, concurrency: int) -> Predictor:
        """Returns the predictor of a replica that runs `concurrency` requests at a time."""
        if concurrency not in self._predictors:
            load = replace(self.workload, concurrency=concurrency)
            self._predictors[concurrency] = Predictor(self.model, load)
        return self._predictors[concurrency]

    def equal(self, replicas: int) -> Predictor:
        """Returns the predictor of each of `replicas` replicas that hold equal parts of the
        load."""
        return self.predictor(ceil_div(self.workload.concurrency, replicas))

    def most(self, fits: Callable[[Predictor], bool]) -> int:
        """Requests of the load for which a replica has memory: those up to which it `fits`."""
        sizes = range(1, self.workload.concurrency + 1)
        return bisect_left(sizes, True, key=lambda size: not fits(self.predictor(size)))

    def capacity(self, stages: Sequence[StageAssignment]) -> int:
        """Requests of the load for which each replica of this pipeline has memory."""
        return self.most(lambda predictor: predictor.fits(stages))

    def shares(self, most: Sequence[int], replicas: Sequence[int]) -> list[int] | None:
        """Requests of each replica of each pipeline, of which it holds `most`; None if they do not
        hold the load."""

        def held(level: int) -> int:
            return sum(min(level, each) * num for each, num in zip(most, replicas, strict=True))

        levels = range(1, self.workload.concurrency + 1)
        level = bisect_left(levels, self.workload.concurrency, key=held) + 1
        return [min(level, each) for each in most] if level in levels and all(most) else None

    def predict(self, pipelines: Sequence[Sequence[StageAssignment]]) -> Plan | None:
        """Predicts these pipelines side by side; None if they do not hold the load."""
        replicas = [len(stages[0].devices) for stages in pipelines]
        equal = self.equal(sum(replicas))
        shares: list[int] | None = [equal.load.concurrency] * len(pipelines)
        if not all(map(equal.fits, pipelines)):
            shares = self.shares([self.capacity(stages) for stages in pipelines], replicas)
        if shares is None:
            return None
        predicted = (
            self.predictor(share).predict(stages)
            for share, stages in zip(shares, pipelines, strict=True)
        )
        return Plan.of(predicted, self.workload.concurrency)
