"""The best pipeline over some devices: which of them, in which order, and the layers of each.

A stage with more layers never costs less. So stages below a limit are best as long as they can be,
and of each selection of devices only the furthest layer must be known that they reach. Of few
devices that is exact, since every selection in every order is tried; of more, the selections that
reach furthest go on. The limit is found by halves. For a request alone stages are bounded by memory
only, and their sum counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, nlargest
from itertools import pairwise
from typing import NamedTuple

from shardline.base.rounding import ceil_div
from shardline_fleet.planner.device_profile import DeviceProfile
from shardline_fleet.planner.devices import Counts, DeviceKinds, dtype_groups, zones
from shardline_fleet.planner.prediction import Predictor, StageAssignment
from shardline_fleet.planner.step_cost import StageCost, stage_cost

FEW_DEVICES = 5
"""Of these every selection is tried, in every order."""
MAX_TRIED = 256
"""Of more devices, stages that are tried for one limit: a few milliseconds."""
MAX_TRIED_ALONE = 20_000
"""Stages that are tried for a request alone, before the search hurries."""
FEW_LENGTHS = 8
"""Numbers of stages of which one is tried first, of many; then those next to the best."""
NEAR = 3e-3
"""Halving ends where two limits differ by less of their value."""
ROUNDING = 1e-9
"""Of sums, relative to them, at most."""


class Slice(NamedTuple):
    """Layers [first, stop) on a device of the kind with this index."""

    kind: int
    first: int
    stop: int


Paths = dict[Counts, tuple[int, tuple[Slice, ...]]]
"""By the devices that are left: the furthest layer that the others reach, and their stages."""


@dataclass(frozen=True, slots=True)
class Search:
    """Ways to use devices, each with its group and its cost; and how many devices a group has."""

    kinds: Sequence[tuple[int, StageCost]]
    counts: Counts

    @property
    def num_layers(self) -> int:
        """Returns the number of layers of the model."""
        return self.kinds[0][1].num_layers

    def least_bottleneck(self, num_stages: int, below: float = float("inf")) -> list[Slice] | None:
        """Returns the split into `num_stages` stages with the fastest bottleneck; None if none fits
        or is faster than `below`."""
        best = next(self.splits(num_stages, below), None)
        low = 1 / sum(nlargest(num_stages, self._rates()))
        while best is not None:
            high = self.bottleneck(best)
            is_near = high - low <= NEAR * high
            limit = high if is_near else (low + high) / 2
            found = next(self.splits(num_stages, limit), None)
            if found is None and is_near:
                break
            if found is None:
                low = limit
            else:
                best = found
        return best

    def least_sum(self) -> list[Slice] | None:
        """Returns the split into any number of stages that together take least; None if none fits.
        It is the cheapest path through (devices left, next layer), found best first with a bound
        from below for the missing layers (A*). Past the limit of work a stage takes all it can, and
        the first whole path ends the search."""
        bounds = _Bounds(self.kinds)
        queue: list[tuple[float, float, int, Counts, tuple[Slice, ...]]]
        queue = [(0.0, 0.0, 0, self.counts, ())]
        done: set[tuple[Counts, int]] = set()
        num_tried = 0
        while queue:
            _, spent_s, first, left, path = heappop(queue)
            if first == self.num_layers:
                return list(path)
            if (left, first) in done:
                continue
            done.add((left, first))
            is_hurried = num_tried > MAX_TRIED_ALONE
            for index, (group, cost) in enumerate(self.kinds):
                if not left[group]:
                    continue
                fewer = _one_less(left, group)
                most = cost.reach(first, self.num_layers, float("inf"))
                for stop in range(most, most - 1 if is_hurried else first, -1):
                    num_tried += 1
                    if stop == first or (fewer, stop) in done or not cost.fits(first, stop):
                        continue
                    so_far_s = spent_s + cost.stage(first, stop)
                    estimate_s = so_far_s + bounds.of(fewer, stop)
                    if estimate_s < float("inf"):
                        longer = (*path, Slice(index, first, stop))
                        rank = 0.0 - stop if is_hurried else estimate_s
                        heappush(queue, (rank, so_far_s, stop, fewer, longer))
        return None

    def _rates(self) -> Iterator[float]:
        """Yields what each device computes of the model in a second, at most."""
        for group, num in enumerate(self.counts):
            costs = [cost for number, cost in self.kinds if number == group]
            yield from [max(1 / max(cost.seconds[-1], 1e-12) for cost in costs)] * num

    def bottleneck(self, split: Sequence[Slice]) -> float:
        """Returns the seconds of the slowest stage."""
        return max(map(self.seconds, split))

    def seconds(self, part: Slice) -> float:
        """Returns the seconds of one stage."""
        return self.kinds[part.kind][1].stage(part.first, part.stop)

    def splits(
        self, num_stages: int | None = None, below: float = float("inf")
    ) -> Iterator[list[Slice]]:
        """Yields splits into `num_stages` stages, or any number, each stage below a limit."""
        # Less by more than sums of floats are off.
        limit = below * (1 - ROUNDING)
        most = min(sum(self.counts), self.num_layers)
        if not 1 <= (num_stages or 1) <= most:
            return
        paths: Paths = {self.counts: (0, ())}
        for missing in reversed(range(num_stages or most)):
            end = self.num_layers - (missing if num_stages else 1)
            further: Paths = {}
            for left, (first, path) in paths.items():
                for index, (group, cost) in enumerate(self.kinds):
                    if not left[group]:
                        continue
                    is_end = not missing or num_stages is None
                    if is_end and cost.holds(first, self.num_layers, limit):
                        yield [*path, Slice(index, first, self.num_layers)]
                    fewer = _one_less(left, group)
                    stop = cost.reach(first, end, limit) if missing else 0
                    if stop > further.get(fewer, (first,))[0]:
                        further[fewer] = stop, (*path, Slice(index, first, stop))
            paths = further
            if sum(self.counts) > FEW_DEVICES:
                num = max(1, MAX_TRIED // (num_stages or most) // len(self.kinds))
                paths = dict(nlargest(num, further.items(), key=lambda item: item[1][0]))


def fastest(
    predictor: Predictor,
    profiles: Sequence[DeviceProfile],
    num_stages: int | None = None,
    least: float = 0.0,
) -> list[StageAssignment] | None:
    """Returns the stages of the fastest pipeline over these devices, some of which may be left out;
    None if none gives more than `least` tokens/s."""
    best = None
    speed = least
    num_layers = len(predictor.model.layers)
    for kinds in _alike(profiles):
        most = min(sum(kinds.counts), num_layers)
        step = ceil_div(most, FEW_LENGTHS)
        lengths = [*range(most, 0, -step)] if _holds(predictor, kinds) else []
        lengths = [num_stages] if num_stages else lengths
        center = 0
        while lengths:
            for length in lengths:
                search = _search(predictor, kinds, length)
                found = search.least_bottleneck(length, predictor.busy_s(speed))
                stages = _assigned(kinds, found)
                if stages and (its := predictor.predict(stages).tokens_per_s) > speed:
                    best = stages
                    speed = its
                    center = length
            is_last = num_stages or step == 1 or not center
            step = ceil_div(step, 2)
            near = (center - step, center + step)
            lengths = [] if is_last else [length for length in near if 0 < length <= most]
    return best


def soonest(
    predictor: Predictor, profiles: Sequence[DeviceProfile]
) -> list[StageAssignment] | None:
    """Returns the stages through which a request alone goes fastest; None if none fits."""
    model = predictor.model
    load = predictor.load
    found = []
    for kinds in _alike(profiles):
        costs = [
            (group, stage_cost(way, model, load.alone(), load.kv_tokens, load.concurrency))
            for group, way in kinds.ways
        ]
        stages = _assigned(kinds, Search(costs, kinds.counts).least_sum())
        found += [stages] if stages else []
    return min(found, key=lambda stages: predictor.predict(stages).request_s, default=None)


def holds(predictor: Predictor, profiles: Sequence[DeviceProfile]) -> bool:
    """Whether the devices hold the model and the KV of the load in any split."""
    return any(_holds(predictor, kinds) for kinds in _alike(profiles))


def _holds(predictor: Predictor, kinds: DeviceKinds) -> bool:
    most = min(sum(kinds.counts), len(predictor.model.layers))
    return next(_search(predictor, kinds, most).splits(), None) is not None


def _alike(profiles: Sequence[DeviceProfile]) -> Iterator[DeviceKinds]:
    """Yields devices of which the stages may stand in one pipeline: of all, and of each zone."""
    yield from (DeviceKinds.of(group) for zone in zones(profiles) for group in dtype_groups(zone))


def _search(predictor: Predictor, kinds: DeviceKinds, num_stages: int) -> Search:
    costs = [(group, predictor.cost(way, num_stages)) for group, way in kinds.ways]
    return Search(costs, kinds.counts)


def _assigned(kinds: DeviceKinds, split: Sequence[Slice] | None) -> list[StageAssignment]:
    """Assigns separate devices to the stages."""
    left = [list(reversed(kind)) for kind in kinds.kinds]
    stages = []
    for placed in split or ():
        group, way = kinds.ways[placed.kind]
        device = left[group].pop()
        (profile,) = [profile for profile in device if profile.way == way.way]
        stages.append(StageAssignment((profile,), placed.first, placed.stop))
    return stages


def _one_less(counts: Counts, group: int) -> Counts:
    return (*counts[:group], counts[group] - 1, *counts[group + 1 :])


class _Bounds:
    """Bounds from below the seconds for the layers from one on: the cheapest layers on the devices
    that are left, filled in order of their seconds for each layer."""

    def __init__(self, kinds: Sequence[tuple[int, StageCost]]) -> None:
        self._num_layers = kinds[0][1].num_layers
        self._tail_s = min(cost.tail_s for _, cost in kinds)
        self._rates = []
        for group, cost in kinds:
            least_s = min(stop - first for first, stop in pairwise(cost.seconds))
            least_bytes = max(1.0, min(stop - first for first, stop in pairwise(cost.bytes)))
            num_held = int(cost.memory_bytes / least_bytes) if not cost.streaming else 1 << 30
            if (size := min(self._num_layers, num_held)) > 0:
                self._rates.append((least_s + cost.stage_s / size, size, group))
        self._rates.sort()
        self._known: dict[tuple[Counts, int], float] = {}

    def of(self, left: Counts, first: int) -> float:
        """Returns the bound with these devices left; infinite if they cannot hold the rest."""
        key = (left, first)
        if key not in self._known:
            self._known[key] = self._computed(left, self._num_layers - first)
        return self._known[key]

    def _computed(self, left: Counts, missing: int) -> float:
        if missing == 0:
            return 0.0
        total_s = self._tail_s
        for rate_s, size, group in self._rates:
            # A group's devices may be used as its slower kinds too, which hold more: each kind gets
            # all of them.
            taken = min(missing, size * left[group])
            total_s += taken * rate_s
            missing -= taken
            if missing == 0:
                return max(0.0, total_s)
        return float("inf")
