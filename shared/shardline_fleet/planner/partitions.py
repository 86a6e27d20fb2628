"""Which devices work together: partitions of them into pipelines side by side, each with its own
split.

A part is a number of devices of each kind, and is searched once for each number of requests. Of few
devices every partition is tried. Of more, each step that makes the whole faster is taken: a part is
cut in two, two become one, a device goes from one to another; until MAX_WORK is done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, permutations, product

from shardline_fleet.planner.chains import fastest, holds
from shardline_fleet.planner.device_profile import DeviceProfile
from shardline_fleet.planner.devices import Counts, DeviceKinds, zones
from shardline_fleet.planner.load_sharing import LoadSharing
from shardline_fleet.planner.plan import PipelinePlan, Plan
from shardline_fleet.planner.prediction import StageAssignment

FEW_DEVICES = 6
"""Of these every partition is tried: at most 203."""
MAX_WORK = 1500
"""Devices times kinds of the parts that are searched, and parts of the partitions that are
compared: a few tenths of a second."""
Partition = tuple[Counts, ...]
"""Parts in falling order, each for one replica of a pipeline."""


@dataclass(frozen=True, slots=True)
class Chain:
    """The fastest pipeline of a part."""

    stages: list[StageAssignment]
    plan: PipelinePlan


@dataclass(slots=True)
class Partitions:
    """The devices of a load, and what is known of their parts."""

    sharing: LoadSharing
    profiles: Sequence[DeviceProfile]
    _kinds: DeviceKinds = field(init=False)
    _zones: list[Counts] = field(init=False)
    _chains: dict[tuple[Counts, int], Chain | None] = field(default_factory=dict)
    """By part and requests."""
    _are_able: dict[Counts, bool] = field(default_factory=dict)
    """Whether a part holds the model with one request."""
    _capacities: dict[Counts, int] = field(default_factory=dict)
    _speeds: dict[Partition, float] = field(default_factory=dict)
    _work: int = 0

    def __post_init__(self) -> None:
        self._kinds = DeviceKinds.of(self.profiles, by_machine=True)
        self._zones = [self._kinds.counted(zone) for zone in zones(self.profiles)[1:]]

    def best(self, start: Sequence[StageAssignment], num: int) -> list[list[list[StageAssignment]]]:
        """Returns the fastest partitions that were found, at most `num`, with the stages of their
        pipelines. Steps begin with the replicas of `start`, and what they leave over, then with all
        devices in one part."""
        every = self._kinds.counts
        if sum(every) <= FEW_DEVICES:
            for partition in partitions(every):
                self._speed(partition)
        else:
            parts = [
                self._kinds.counted(devices)
                for devices in zip(*(stage.devices for stage in start), strict=True)
            ]
            rest = tuple(num - sum(used) for num, *used in zip(every, *parts, strict=True))
            self._climb(_changed((), [], [*parts, rest]))
            self._climb((every,))
        found = sorted(filter(self._speeds.get, self._speeds), key=lambda each: -self._speeds[each])
        return [self._pipelines(partition) for partition in found[:num]]

    def _climb(self, partition: Partition) -> None:
        """Takes steps while they make the whole faster and work is left."""
        steps = self._steps(partition)
        while self._work <= MAX_WORK and (step := next(steps, None)) is not None:
            if self._speed(step) > self._speed(partition):
                partition = step
                steps = self._steps(partition)

    def _steps(self, partition: Partition) -> Iterator[Partition]:
        """Yields what may be better: a part in two pieces, two parts as one, a device in another
        part."""
        for part in dict.fromkeys(sorted(partition, key=sum, reverse=True)):
            for piece in self._pieces(part):
                if any(piece) and piece != part:
                    yield _changed(partition, [part], [piece, _less(part, piece)])
        for one, other in dict.fromkeys(combinations(partition, 2)):
            yield _changed(partition, [one, other], [_more(one, other)])
        for one, other in dict.fromkeys(permutations(partition, 2)):
            for moved in _singles(one):
                yield _changed(partition, [one, other], [_less(one, moved), _more(other, moved)])

    def _pieces(self, part: Counts) -> Iterator[Counts]:
        """Yields what may be cut off a part: what its pipeline uses, the devices of a zone, every
        other device, the faster half, a device of each kind."""
        chain = self._chain(part, self.sharing.workload.concurrency)
        yield self._kinds.counted([stage.profile for stage in chain.stages] if chain else [])
        yield from (tuple(map(min, part, zone)) for zone in self._zones)
        order = [kind for kind, num in enumerate(part) for _ in range(num)]
        for half in (order[::2], order[: len(order) // 2]):
            yield tuple(half.count(kind) for kind in range(len(part)))
        yield from _singles(part)

    def _speed(self, partition: Partition) -> float:
        """Returns tokens/s of all parts together; 0 if they do not hold the load."""
        if partition not in self._speeds:
            self._work += len(partition)
            chains = [self._chain(*shared) for shared in self._shares(partition)]
            found = [chain.plan for chain in chains if chain is not None]
            concurrency = self.sharing.workload.concurrency
            self._speeds[partition] = Plan.of(found, concurrency).tokens_per_s if found else 0.0
        return self._speeds[partition]

    def _shares(self, partition: Partition) -> list[tuple[Counts, int]]:
        """Returns the requests of each part that holds the model; nothing if together they do not
        hold the load."""
        parts = [part for part in partition if self._is_able(part)]
        if not parts:
            return []
        equal = self.sharing.equal(len(parts)).load.concurrency
        if all(self._chain(part, equal) for part in parts):
            return [(part, equal) for part in parts]
        shares = self.sharing.shares([self._capacity(part) for part in parts], [1] * len(parts))
        return list(zip(parts, shares, strict=True)) if shares else []

    def _is_able(self, part: Counts) -> bool:
        if part not in self._are_able:
            self._are_able[part] = holds(self.sharing.predictor(1), self._kinds.first(part))
        return self._are_able[part]

    def _capacity(self, part: Counts) -> int:
        """Returns the requests that a part has memory for."""
        if part not in self._capacities:
            self._work += sum(part)
            profiles = self._kinds.first(part)
            self._capacities[part] = self.sharing.most(lambda one: holds(one, profiles))
        return self._capacities[part]

    def _chain(self, part: Counts, concurrency: int) -> Chain | None:
        key = part, concurrency
        if key not in self._chains:
            self._work += sum(part) * sum(map(bool, part))
            predictor = self.sharing.predictor(concurrency)
            stages = fastest(predictor, self._kinds.first(part))
            self._chains[key] = Chain(stages, predictor.predict(stages)) if stages else None
        return self._chains[key]

    def _pipelines(self, partition: Partition) -> list[list[StageAssignment]]:
        """Returns the pipelines, with separate devices; equal parts are replicas."""
        used = tuple(0 for _ in self._kinds.kinds)
        pipelines = []
        for (part, share), replicas in Counter(self._shares(partition)).items():
            chain = self._chain(part, share)
            assert chain is not None
            pipelines.append(self._kinds.dealt(chain.stages, part, replicas, used))
            used = _more(used, tuple(num * replicas for num in part))
        return pipelines


def partitions(every: Counts, most: Counts | None = None) -> Iterator[Partition]:
    """Yields each partition of these devices into parts, none of which comes behind `most`."""
    if not any(every):
        yield ()
        return
    for part in product(*(range(num, -1, -1) for num in every)):
        if any(part) and (most is None or part <= most):
            for rest in partitions(_less(every, part), part):
                yield (part, *rest)


def _singles(part: Counts) -> Iterator[Counts]:
    """Yields one device of each kind of a part."""
    for kind, num in enumerate(part):
        if num:
            yield tuple(int(kind == each) for each in range(len(part)))


def _less(one: Counts, other: Counts) -> Counts:
    return tuple(mine - its for mine, its in zip(one, other, strict=True))


def _more(one: Counts, other: Counts) -> Counts:
    return tuple(mine + its for mine, its in zip(one, other, strict=True))


def _changed(partition: Partition, gone: Sequence[Counts], come: Sequence[Counts]) -> Partition:
    left = list(partition)
    for part in gone:
        left.remove(part)
    return tuple(sorted([*left, *filter(any, come)], reverse=True))
