"""Small changes of pipelines: layers that move to the next stage, devices that change places, and
boundaries that no two pipelines have in common."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate, combinations

from shardline_fleet.planner.devices import are_alike
from shardline_fleet.planner.load_sharing import LoadSharing
from shardline_fleet.planner.prediction import Predictor, StageAssignment

FEW_STAGES = 16
"""Any two of these are tried in exchanged places."""
MAX_REORDERED = 4
"""Stages of a pipeline of which other orders are tried, each with layers moved while that helps."""
Pipeline = Sequence[StageAssignment]
Cost = Callable[[Predictor, Pipeline], float]


def bounds(stages: Pipeline) -> set[int]:
    """Returns the layers at which frames change stages."""
    return {stage.first for stage in stages[1:]}


def neighbors(stages: Pipeline) -> Iterator[Pipeline]:
    """Yields the pipeline with one layer moved to the next stage or from it, and with two unlike
    devices that change places: next to each other, or anywhere if links are known and stages are
    few."""
    yield from _moved(stages)
    has_links = any(device.links for stage in stages for device in stage.devices)
    furthest = len(stages) if has_links and len(stages) <= FEW_STAGES else 1
    for place, other in _unlike(stages):
        if other - place <= furthest:
            swapped = list(stages)
            swapped[place] = stages[place]._replace(devices=stages[other].devices)
            swapped[other] = stages[other]._replace(devices=stages[place].devices)
            yield swapped


def reordered(predictor: Predictor, stages: Pipeline, cost: Cost) -> Iterator[Pipeline]:
    """Yields a short pipeline with two unlike devices that change places, each with as many layers
    as it had; then layers move one by one as long as that makes it better."""
    for place, other in _unlike(stages if len(stages) <= MAX_REORDERED else ()):
        carried = list(stages)
        carried[place], carried[other] = stages[other], stages[place]
        ends = accumulate(stage.stop - stage.first for stage in carried)
        order: Pipeline = [
            stage._replace(first=end - stage.stop + stage.first, stop=end)
            for stage, end in zip(carried, ends, strict=True)
        ]
        best = cost(predictor, order)
        while better := [
            (its, number, each)
            for number, each in enumerate(_moved(order))
            if predictor.fits(each) and (its := cost(predictor, each)) < best
        ]:
            best, _, order = min(better)
        yield order


def apart(sharing: LoadSharing, pipelines: Sequence[Pipeline]) -> list[Pipeline] | None:
    """Returns the pipelines, the fastest first, each with separate boundaries; None if the model
    has too few layers, or memory does not allow it.

    A head takes any free stage that goes on where its layers end. While no other pipeline has a
    boundary there, that is a stage of its own pipeline, on the device that the plan counts. Of two
    that meet the faster one keeps its place.
    """
    plan = sharing.predict(pipelines)
    if plan is None:
        return None
    order = sorted(range(len(pipelines)), key=lambda place: -plan.pipelines[place].tokens_per_s)
    taken: set[int] = set()
    found: list[Pipeline] = []
    for place in order:
        predictor = sharing.predictor(plan.pipelines[place].concurrency)
        stages = _freed(predictor, pipelines[place], taken)
        if stages is None:
            return None
        taken |= bounds(stages)
        found.append(stages)
    return found


def _freed(predictor: Predictor, stages: Pipeline, taken: Collection[int]) -> Pipeline | None:
    """Returns the stages with each boundary that is taken at the nearest free one before or behind
    it, whichever is faster."""
    for place in range(len(stages) - 1):
        bound = stages[place].stop
        if bound not in taken:
            continue
        before = range(bound - 1, stages[place].first, -1)
        behind = range(bound + 1, stages[place + 1].stop)
        free = [next((each for each in way if each not in taken), 0) for way in (before, behind)]
        cuts = [_cut(stages, place, each) for each in free if each]
        fitting = [cut for cut in cuts if predictor.fits(cut)]
        if not fitting:
            return None
        stages = max(fitting, key=lambda cut: predictor.predict(cut).tokens_per_s)
    return stages


def _moved(stages: Pipeline) -> Iterator[Pipeline]:
    for place in range(len(stages) - 1):
        for bound in (stages[place].stop - 1, stages[place].stop + 1):
            if stages[place].first < bound < stages[place + 1].stop:
                yield _cut(stages, place, bound)


def _cut(stages: Pipeline, place: int, bound: int) -> Pipeline:
    """Returns the stages with the boundary behind one of them at this layer."""
    left = stages[place]._replace(stop=bound)
    right = stages[place + 1]._replace(first=bound)
    return [*stages[:place], left, right, *stages[place + 2 :]]


def _unlike(stages: Pipeline) -> Iterator[tuple[int, int]]:
    """Yields the places of any two stages that would not be the same with their places
    exchanged."""
    for (place, left), (other, right) in combinations(enumerate(stages), 2):
        machines = [[device.machine for device in stage.devices] for stage in (left, right)]
        if machines[0] != machines[1] or not are_alike((left.profile,), (right.profile,)):
            yield place, other
