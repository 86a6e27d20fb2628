"""Decides where the stages of pipelines side by side begin: each inner boundary belongs to one
pipeline.

A head takes any free stage that goes on where its layers end. While no other pipeline has a
boundary there, that is a stage of the head's own pipeline, on the device that the plan counts; and
no head takes what another one cannot do without.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardline_costs.prediction import Predictor, StageAssignment
from shardline_fleet.planner.load_sharing import LoadSharing


def bounds(stages: Sequence[StageAssignment]) -> set[int]:
    """Layers at which frames change stages."""
    return {stage.first for stage in stages[1:]}


def apart(
    sharing: LoadSharing, pipelines: Sequence[Sequence[StageAssignment]]
) -> list[Sequence[StageAssignment]] | None:
    """The same pipelines, the fastest first, each with separate boundaries: of two that meet the
    faster one keeps its place. None if the model has too few layers, or memory does not allow
    it."""
    plan = sharing.predict(pipelines)
    if plan is None:
        return None
    order = sorted(range(len(pipelines)), key=lambda place: -plan.pipelines[place].tokens_per_s)
    taken: set[int] = set()
    found: list[Sequence[StageAssignment]] = []
    for place in order:
        predictor = sharing.predictor(plan.pipelines[place].concurrency)
        stages = _moved(predictor, pipelines[place], taken)
        if stages is None:
            return None
        taken |= bounds(stages)
        found.append(stages)
    return found


def _moved(
    predictor: Predictor, stages: Sequence[StageAssignment], taken: set[int]
) -> Sequence[StageAssignment] | None:
    """Returns the stages with each boundary that is taken at the nearest free one before or behind
    it, whichever is faster."""
    for place in range(1, len(stages)):
        left = stages[place - 1]
        right = stages[place]
        if right.first not in taken:
            continue
        before = [bound for bound in range(left.first + 1, right.first) if bound not in taken][-1:]
        behind = [bound for bound in range(right.first + 1, right.stop) if bound not in taken][:1]
        ways = [
            [
                *stages[: place - 1],
                left._replace(stop=bound),
                right._replace(first=bound),
                *stages[place + 1 :],
            ]
            for bound in (*before, *behind)
        ]
        fitting = [way for way in ways if predictor.fits(way)]
        if not fitting:
            return None
        stages = max(fitting, key=lambda way: predictor.predict(way).tokens_per_s)
    return stages
