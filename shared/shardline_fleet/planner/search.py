"""The search: contiguous layers over devices, least bottleneck or least sum. Knows only numbers.

Equal devices are one group with a number, so that the search runs over how many of each group are
used. A device may be used in several ways (dtypes, ranks): each is a kind of its group.

**Bottleneck.** Bisection over a limit; under one, each stage takes as many layers as it may. That
is exact for an order of kinds: a part of a range costs and weighs less than the range, so a stage
that takes fewer layers helps none. Few devices are tried in every order, by how many of each group
are used: of these orders only the one that reaches furthest counts. Of more, those that take most
layers follow each other, with each kind as the last stage, which computes the output layer.

**Sum.** The cheapest path through (devices used, next layer). Of many only the cheapest to each
layer go on, and stages end at every other layer, or third, and so on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from math import inf, prod
from typing import NamedTuple

from shardline.base.rounding import ceil_div
from shardline_costs.step_cost import StageCost

NEAR = 1e-3
"""Bisection ends where two limits differ by less of their value; then limits follow the plans that
are found."""
ROUNDING = 1e-9
"""Of sums, relative to them, at most."""
MAX_USED = 256
"""Numbers of used devices, those of 8 unlike ones, up to which every order is tried."""
MAX_LAST = 4
"""Kinds of many that are tried as the last stage."""
MAX_TRIED = 50_000
"""Stages tried for a least sum, about."""
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


class Path(NamedTuple):
    """Stages from the first layer on, and the seconds of all."""

    seconds: float
    stages: tuple[Slice, ...]


@dataclass(frozen=True, slots=True)
class Search:
    """Kinds of devices, and how many devices there are of each group."""

    kinds: Sequence[DeviceKind]
    counts: Counts

    @property
    def num_layers(self) -> int:
        """Returns the number of layers of the model."""
        return self.kinds[0].cost.num_layers

    def least_bottleneck(self, num_stages: int, below: float = inf) -> list[Slice] | None:
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
        return self._within(num_stages, inf) is not None

    def least_sum(self) -> list[Slice] | None:
        """The split, into any number of stages, that together take least; None if none fits."""
        num_tried = max(1, len(self.kinds) * self.num_layers**2 // 2)
        width = max(1, MAX_TRIED // num_tried)
        stride = ceil_div(num_tried, MAX_TRIED)
        paths: list[dict[Counts, Path]] = [{} for _ in range(self.num_layers + 1)]
        paths[0][self._none] = Path(0.0, ())
        for first, here in enumerate(paths[:-1]):
            for used in nsmallest(width, here, key=lambda used: here[used].seconds):
                for index, more in self._next(used, range(len(self.kinds))):
                    cost = self.kinds[index].cost
                    furthest = cost.reach(first, self.num_layers, inf)
                    for stop in range(furthest, first, -stride):
                        seconds = here[used].seconds + cost.stage(first, stop)
                        known = paths[stop].get(more)
                        if cost.fits(first, stop) and (known is None or seconds < known.seconds):
                            stages = (*here[used].stages, Slice(index, first, stop))
                            paths[stop][more] = Path(seconds, stages)
        best = min(paths[-1].values(), default=None)
        return list(best.stages) if best else None

    def bottleneck(self, plan: Sequence[Slice]) -> float:
        """The seconds of its slowest stage."""
        return max(self.kinds[each.kind].cost.stage(each.first, each.stop) for each in plan)

    def _within(self, num_stages: int, limit: float) -> list[Slice] | None:
        """A split with every stage below `limit`, or None."""
        # Less by more than sums of floats are off: a plan that just keeps a limit must not look
        # like one below it.
        limit *= 1 - ROUNDING
        sizes = [kind.cost.most(limit) for kind in self.kinds]
        by_size = sorted(range(len(sizes)), key=lambda kind: -sizes[kind])
        orders = self._widest_first(num_stages, limit, sizes, by_size)
        if self._num_used <= MAX_USED and orders:
            return self._in_any_order(num_stages, limit, by_size)
        covers = (self._covered(order, limit) for order in orders)
        return next((cover for cover in covers if cover is not None), None)

    def _widest_first(
        self, num_stages: int, limit: float, sizes: Sequence[int], by_size: Sequence[int]
    ) -> list[list[int]]:
        """Returns kinds in order of the layers that they hold below `limit`, their `sizes`, behind
        them each one as the last stage that may be; none if layers would be left over wherever
        stages began."""
        widest: dict[int, int] = {}
        for index in by_size:
            widest.setdefault(self.kinds[index].group, index)
        devices = [index for group, index in widest.items() for _ in range(self.counts[group])]
        orders = []
        for last, kind in enumerate(self.kinds):
            if self.counts[kind.group]:
                others = list(devices)
                others.remove(widest[kind.group])
                order = [*others[: num_stages - 1], last]
                held = sum(sizes[index] for index in order[:-1])
                spare = held - kind.cost.tail(limit)
                if spare >= 0 and len(order) == num_stages:
                    orders.append((spare, order))
        orders.sort(key=lambda found: -found[0])
        return [order for _, order in orders[:MAX_LAST]]

    def _covered(self, order: Sequence[int], limit: float) -> list[Slice] | None:
        """All layers over kinds in this order, each with as many as it takes below `limit`; None
        if layers are left over."""
        cover = [Slice(-1, 0, 0)]
        for num_behind, index in zip(reversed(range(len(order))), order, strict=True):
            first = cover[-1].stop
            stop = self._reach(index, first, num_behind, limit)
            if stop == first:
                return None
            cover.append(Slice(index, first, stop))
        return cover[1:]

    def _in_any_order(
        self, num_stages: int, limit: float, kinds: Sequence[int]
    ) -> list[Slice] | None:
        """All layers over kinds in the order that reaches furthest, of equals the first; None if
        none reaches all."""
        covers: dict[Counts, list[Slice]] = {self._none: []}
        for num_behind in reversed(range(num_stages)):
            longer: dict[Counts, list[Slice]] = {}
            for used, cover in covers.items():
                first = cover[-1].stop if cover else 0
                for index, more in self._next(used, kinds):
                    stop = self._reach(index, first, num_behind, limit)
                    if stop > max(first, longer[more][-1].stop if more in longer else 0):
                        longer[more] = [*cover, Slice(index, first, stop)]
            covers = longer
        return next(iter(covers.values()), None)

    def _reach(self, kind: int, first: int, num_behind: int, limit: float) -> int:
        """The layer to which a stage takes as many as it may below `limit`, with one left for each
        stage behind it; `first` if it may take none, or is the last and may not take all."""
        cost = self.kinds[kind].cost
        if num_behind == 0:
            return self.num_layers if cost.holds(first, self.num_layers, limit) else first
        return cost.reach(first, self.num_layers - num_behind, limit)

    def _next(self, used: Counts, kinds: Sequence[int]) -> Iterator[tuple[int, Counts]]:
        """Yields each of these kinds of which a device is left, and what is used with it."""
        for kind in kinds:
            group = self.kinds[kind].group
            if used[group] < self.counts[group]:
                yield kind, (*used[:group], used[group] + 1, *used[group + 1 :])

    @property
    def _none(self) -> Counts:
        return (0,) * len(self.counts)

    @property
    def _num_used(self) -> int:
        """Returns how many numbers of used devices there are."""
        return prod(num + 1 for num in self.counts)
