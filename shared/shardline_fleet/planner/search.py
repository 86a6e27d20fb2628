"""The search: contiguous layers over an order of devices, least bottleneck or least sum. Knows only
numbers.

Equal devices are one group with a number, so that the search runs over how many of each group are
used, not over devices. A device may be used in several ways (dtypes, ranks): each is a kind of its
group.

**Bottleneck.** Can a limit be kept? Stages take as many layers as they may, in every order of
kinds. That is exact: a part of a range costs and weighs less than the range, so a stage that takes
fewer layers helps none. Of the devices that are left only the last layer from which they failed
must be known.

**Sum.** The cheapest path through (devices left, next layer), best first, with a bound from below
for the layers that are missing: A*.

Both are exact until they have used up MAX_OPERATIONS, which fleets of dozens of unlike devices may:
then they return the best that they have found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from shardline_fleet.planner.step_cost import StageCost

NEAR = 1e-3
"""Bisection ends where two limits differ by less of their value; then limits follow the plans that
are found."""
ROUNDING = 1e-9
"""Of sums, relative to them, at most."""
MAX_OPERATIONS = 20_000
"""Stages tried for one limit, or for one least sum."""
Counts = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """A way to use a device of a group."""

    group: int
    """Index of the group of equal devices."""
    cost: StageCost


class Slice(NamedTuple):
    """Layers [first, stop) on a device of the kind with this index."""

    kind: int
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class Search:
    """Kinds of devices, and how many devices there are of each group."""

    kinds: Sequence[DeviceKind]
    counts: Counts

    @property
    def num_layers(self) -> int:
        """Returns the number of layers of the model."""
        return self.kinds[0].cost.num_layers

    def least_bottleneck(self, num_stages: int, below: float = float("inf")) -> list[Slice] | None:
        """Returns the split into `num_stages` stages with the fastest bottleneck; None if none fits
        or is faster than `below`."""
        if not 1 <= num_stages <= min(self.num_layers, sum(self.counts)):
            return None
        best = self._within(num_stages, below)
        if best is None:
            return None
        low = 0.0
        high = self.bottleneck(best)
        while high - low > NEAR * high:
            middle = (low + high) / 2
            found = self._within(num_stages, middle)
            if found is None:
                low = middle
            else:
                best = found
                high = self.bottleneck(found)
        while (found := self._within(num_stages, high)) is not None:
            best = found
            high = self.bottleneck(found)
        return best

    def fits(self, num_stages: int) -> bool:
        """Whether the devices hold all layers in `num_stages` stages."""
        return self._within(num_stages, float("inf")) is not None

    def least_sum(self) -> list[Slice] | None:
        """The split, into any number of stages, that together take least; None if none fits."""
        bounds = _Bounds(self.kinds)
        queue: list[tuple[float, float, int, Counts, tuple[Slice, ...]]] = [
            (0.0, 0.0, 0, self.counts, ())
        ]
        done: set[tuple[Counts, int]] = set()
        operations = 0
        while queue:
            _, spent, first, left, path = heappop(queue)
            if first == self.num_layers:
                return list(path)
            if (left, first) in done:
                continue
            done.add((left, first))
            is_hurried = operations > MAX_OPERATIONS
            for index, kind in enumerate(self.kinds):
                if not left[kind.group]:
                    continue
                fewer = _one_less(left, kind.group)
                most = kind.cost.reach(first, self.num_layers, float("inf"))
                # Past the limit a stage takes all it can: the first whole path ends the search.
                for stop in range(most, most - 1 if is_hurried else first, -1):
                    operations += 1
                    if stop == first or (fewer, stop) in done or not kind.cost.fits(first, stop):
                        continue
                    so_far = spent + kind.cost.stage(first, stop)
                    estimate = so_far + bounds.of(fewer, stop)
                    if estimate < float("inf"):
                        item = (0.0 - stop if is_hurried else estimate, so_far, stop, fewer)
                        heappush(queue, (*item, (*path, Slice(index, first, stop))))
        return None

    def bottleneck(self, plan: Sequence[Slice]) -> float:
        """The seconds of its slowest stage."""
        return max(self.kinds[each.kind].cost.stage(each.first, each.stop) for each in plan)

    def _within(self, num_stages: int, limit: float) -> list[Slice] | None:
        """A split with every stage below `limit`, or None."""
        return _Cover(self.kinds, limit).find(self.counts, 0, num_stages)


class _Cover:
    """Whether layers can be covered with every stage below one limit, and how."""

    def __init__(self, kinds: Sequence[DeviceKind], limit: float) -> None:
        # Less by more than sums of floats are off: a plan that just keeps a limit must not look
        # like one below it.
        self._kinds = kinds
        self._limit = limit * (1 - ROUNDING)
        self._num_layers = kinds[0].cost.num_layers
        sizes = [_most_layers(kind.cost, self._limit) for kind in kinds]
        self._order = sorted(range(len(kinds)), key=lambda index: -sizes[index])
        widest: dict[int, int] = {}
        for kind, size in zip(kinds, sizes, strict=True):
            widest[kind.group] = max(size, widest.get(kind.group, 0))
        self._size = widest
        self._widest = sorted(widest.items(), key=lambda item: -item[1])
        self._tails = [self._num_layers - kind.cost.tail(self._limit) for kind in kinds]
        """The most layers that each holds as the last stage."""
        self._failed: dict[Counts, int] = {}
        """The last layer from which these devices did not reach the end: from an earlier one they
        do not either."""
        self._operations = 0

    def find(self, left: Counts, first: int, num_stages: int) -> list[Slice] | None:
        """Finds `num_stages` stages from layer `first` on, of the devices that are left."""
        if first <= self._failed.get(left, -1) or not self._may_reach(left, first, num_stages):
            return None
        found = self._find(left, first, num_stages)
        if found is None:
            self._failed[left] = first
        return found

    def _find(self, left: Counts, first: int, num_stages: int) -> list[Slice] | None:
        for index in self._order:
            kind = self._kinds[index]
            if not left[kind.group]:
                continue
            self._operations += 1
            if self._operations > MAX_OPERATIONS:
                return None
            if num_stages == 1:
                if kind.cost.holds(first, self._num_layers, self._limit):
                    return [Slice(index, first, self._num_layers)]
                continue
            stop = kind.cost.reach(first, self._num_layers - num_stages + 1, self._limit)
            if stop > first:
                rest = self.find(_one_less(left, kind.group), stop, num_stages - 1)
                if rest is not None:
                    return [Slice(index, first, stop), *rest]
        return None

    def _may_reach(self, left: Counts, first: int, num_stages: int) -> bool:
        """Whether the rest could be covered if each stage held its most, wherever it begins: one as
        the last stage, and of the others those that hold most."""
        missing = self._num_layers - first
        rank = 0
        held = 0
        held_by_one_more = 0
        ranks: dict[int, int] = {}
        for group, size in self._widest:
            if left[group]:
                ranks[group] = rank
                held += size * max(0, min(left[group], num_stages - 1 - rank))
                held_by_one_more += size * max(0, min(left[group], num_stages - rank))
                rank += left[group]
        if rank < num_stages:
            return False
        for tail, kind in zip(self._tails, self._kinds, strict=True):
            if left[kind.group]:
                is_among_them = ranks[kind.group] < num_stages - 1
                others = held_by_one_more - self._size[kind.group] if is_among_them else held
                if others + tail >= missing:
                    return True
        return False


class _Bounds:
    """Bounds from below the seconds for the layers from one on: the cheapest layers on the devices
    that are left, filled in order of their seconds for each layer."""

    def __init__(self, kinds: Sequence[DeviceKind]) -> None:
        self._num_layers = kinds[0].cost.num_layers
        self._rates = sorted(
            (kind.cost.least_s + kind.cost.stage_s / size, size, kind.group)
            for kind in kinds
            if (size := _most_layers(kind.cost, float("inf"))) > 0
        )
        self._tail_s = min(kind.cost.tail_s for kind in kinds)
        self._known: dict[tuple[Counts, int], float] = {}

    def of(self, left: Counts, first: int) -> float:
        """Returns the bound with these devices left; infinite if they cannot hold the rest."""
        if first == self._num_layers:
            return 0.0
        key = (left, first)
        if key not in self._known:
            self._known[key] = self._compute(left, self._num_layers - first)
        return self._known[key]

    def _compute(self, left: Counts, missing: int) -> float:
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


def _most_layers(cost: StageCost, limit: float) -> int:
    """No fewer than any stage below `limit` holds, if it is not the last."""
    room_s = limit - cost.stage_s
    if room_s <= 0 or cost.memory_bytes < 0:
        return 0
    by_time = (
        cost.num_layers
        if room_s >= cost.least_s * cost.num_layers
        else int(room_s / cost.least_s * (1 + ROUNDING / 1000))
    )
    by_memory = (cost.memory_bytes + cost.missing(limit)) / max(1.0, cost.least_bytes)
    return int(min(cost.num_layers, by_time, by_memory))


def _one_less(counts: Counts, group: int) -> Counts:
    return (*counts[:group], counts[group] - 1, *counts[group + 1 :])
