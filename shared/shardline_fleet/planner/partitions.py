"""Which devices work together: partitions of them into pipelines side by side, each with its own
split.

Devices that are alike are one kind with a number, so a part is a number of each kind, and is
searched once for each number of requests. Of few devices every partition is tried. Of more, each
step that makes the whole faster is taken: a part is cut in two, two become one, a device goes from
one to another; until MAX_WORK is done.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations, permutations, product

from shardline.base.rounding import ceil_div
from shardline_costs.device_profile import DeviceProfile
from shardline_costs.plan import Plan
from shardline_costs.prediction import Predictor, StageAssignment
from shardline_fleet.planner.fleet import Device, Fleet, PipelineShape, dtype_groups
from shardline_fleet.planner.load_sharing import LoadSharing
from shardline_fleet.planner.zones import zones

FEW_DEVICES = 6
"""Of these every partition is tried: at most 203."""
FEW_SHAPES = 8
MAX_PART_WORK = 64
"""Kinds of devices times shapes that are tried of a part, unless those are FEW_SHAPES."""
MAX_WORK = 1500
"""The same over all parts that are searched, and parts over all partitions: a few tenths of a
second."""
Counts = tuple[int, ...]
"""Devices of each kind."""
Partition = tuple[Counts, ...]
"""Parts in falling order, each for one replica of a pipeline."""


class Partitions:
    """Partitions the devices of a load; every part is searched once."""

    def __init__(self, sharing: LoadSharing, profiles: Sequence[DeviceProfile]) -> None:
        self._sharing = sharing
        self._kinds = _kinds(profiles)
        self._places = {
            (device[0].host, device[0].device): (number, place)
            for number, kind in enumerate(self._kinds)
            for place, device in enumerate(kind)
        }
        self._chains: dict[tuple[Counts, int], list[StageAssignment] | None] = {}
        """The fastest pipeline of a part with this many requests."""
        self._are_able: dict[Counts, bool] = {}
        """Whether a part holds the model with one request."""
        self._capacities: dict[Counts, int] = {}
        self._speeds: dict[Partition, float] = {}
        self._work = 0
        self._zones = [self._counts(zone) for zone in zones(profiles)[1:]]

    def best(
        self, start: Sequence[StageAssignment] | None, num: int
    ) -> list[list[list[StageAssignment]]]:
        """The fastest partitions that were found, at most `num`, with the stages of their
        pipelines. Steps begin with the pipeline and the replicas of `start`, and what they leave
        over, then with all devices in one part."""
        every = tuple(map(len, self._kinds))
        if sum(every) <= FEW_DEVICES:
            for partition in partitions(every):
                self._speed(partition)
        else:
            if start is not None:
                self._climb(self._of(start, every))
            self._climb((every,))
        found = sorted(
            (each for each, speed in self._speeds.items() if speed),
            key=lambda each: -self._speeds[each],
        )
        return [self._pipelines(partition) for partition in found[:num]]

    def _climb(self, partition: Partition) -> None:
        """Takes steps while they make the whole faster and work is left."""
        speed = self._speed(partition)
        is_better = True
        while is_better:
            is_better = False
            for step in self._steps(partition):
                if self._work > MAX_WORK:
                    return
                if self._speed(step) > speed:
                    partition = step
                    speed = self._speed(step)
                    is_better = True
                    break

    def _steps(self, partition: Partition) -> Iterator[Partition]:
        """Yields what may be better: a part in two pieces, two parts as one, a device in another
        part."""
        for part in dict.fromkeys(sorted(partition, key=sum, reverse=True)):
            for piece in self._pieces(part):
                rest = _less(part, piece)
                if any(piece) and any(rest):
                    yield _changed(partition, [part], [piece, rest])
        for one, other in dict.fromkeys(combinations(partition, 2)):
            yield _changed(partition, [one, other], [tuple(map(sum, zip(one, other, strict=True)))])
        for one, other in dict.fromkeys(permutations(partition, 2)):
            for kind in (kind for kind, num in enumerate(one) if num):
                moved = tuple(int(kind == each) for each in range(len(one)))
                gained = tuple(map(sum, zip(other, moved, strict=True)))
                yield _changed(partition, [one, other], [_less(one, moved), gained])

    def _pieces(self, part: Counts) -> Iterator[Counts]:
        """What may be cut off a part: what its pipeline uses, the devices of a zone, every other
        device, the faster half, a device of each kind."""
        stages = self._chain(part, self._sharing.equal(1).load.concurrency)
        yield self._counts([stage.profile for stage in stages or []])
        for zone in self._zones:
            yield tuple(map(min, part, zone))
        order = [kind for kind, num in enumerate(part) for _ in range(num)]
        for half in (order[::2], order[: len(order) // 2]):
            yield tuple(half.count(kind) for kind in range(len(part)))
        for kind in dict.fromkeys(order):
            yield tuple(int(kind == each) for each in range(len(part)))

    def _speed(self, partition: Partition) -> float:
        """Tokens/s of all parts together; 0 if they do not hold the load."""
        if partition not in self._speeds:
            self._work += len(partition)
            pipelines = [
                self._sharing.predictor(share).predict(stages)
                for part, share in self._shares(partition)
                if (stages := self._chain(part, share)) is not None
            ]
            concurrency = self._sharing.workload.concurrency
            self._speeds[partition] = (
                Plan.of(pipelines, concurrency).tokens_per_s if pipelines else 0.0
            )
        return self._speeds[partition]

    def _shares(self, partition: Partition) -> list[tuple[Counts, int]]:
        """Requests of each part that holds the model; of none if together they do not hold the
        load."""
        parts = [part for part in partition if self._is_able(part)]
        if not parts:
            return []
        equal = self._sharing.equal(len(parts)).load.concurrency
        if all(self._chain(part, equal) for part in parts):
            return [(part, equal) for part in parts]
        shares = self._sharing.shares([self._capacity(part) for part in parts], [1] * len(parts))
        return list(zip(parts, shares, strict=True)) if shares else []

    def _is_able(self, part: Counts) -> bool:
        if part not in self._are_able:
            self._are_able[part] = self._holds(part, self._sharing.predictor(1))
        return self._are_able[part]

    def _capacity(self, part: Counts) -> int:
        """Requests that a part has memory for."""
        if part not in self._capacities:
            self._work += sum(map(bool, part)) * self._sharing.workload.concurrency.bit_length()
            self._capacities[part] = self._sharing.most(
                lambda predictor: self._holds(part, predictor)
            )
        return self._capacities[part]

    def _chain(self, part: Counts, concurrency: int) -> list[StageAssignment] | None:
        key = part, concurrency
        if key not in self._chains:
            num_kinds = sum(map(bool, part))
            self._work += num_kinds * min(sum(part), max(FEW_SHAPES, MAX_PART_WORK // num_kinds))
            self._chains[key] = fastest(self._sharing.predictor(concurrency), self._profiles(part))
        return self._chains[key]

    def _holds(self, part: Counts, predictor: Predictor) -> bool:
        return any(
            shape.fits(predictor)
            for group in dtype_groups(self._profiles(part))
            for shape in shapes(Fleet.of(group), len(predictor.model.layers))
        )

    def _pipelines(self, partition: Partition) -> list[list[StageAssignment]]:
        """Returns the pipelines, with separate devices; equal parts are replicas."""
        used = Counter[int]()
        pipelines = []
        for (part, share), replicas in Counter(self._shares(partition)).items():
            stages = self._chain(part, share)
            assert stages is not None
            pipelines.append([self._dealt(stage, part, replicas, used) for stage in stages])
            used.update({kind: num * replicas for kind, num in enumerate(part)})
        return pipelines

    def _dealt(
        self, stage: StageAssignment, part: Counts, replicas: int, used: Counter[int]
    ) -> StageAssignment:
        """A stage on the first device of each replica that is like its own."""
        kind, place = self._places[stage.profile.host, stage.profile.device]
        devices = [
            self._kinds[kind][used[kind] + place + number * part[kind]]
            for number in range(replicas)
        ]
        ways = [way for device in devices for way in device if way.way == stage.profile.way]
        return stage._replace(devices=tuple(ways))

    def _profiles(self, part: Counts) -> list[DeviceProfile]:
        """All ways to use the first devices of each kind."""
        return [
            way
            for kind, num in zip(self._kinds, part, strict=True)
            for device in kind[:num]
            for way in device
        ]

    def _of(self, stages: Sequence[StageAssignment], every: Counts) -> Partition:
        """The parts of these equal replicas, and what they leave over."""
        replicas = len(stages[0].devices)
        parts = [
            self._counts([stage.devices[number] for stage in stages]) for number in range(replicas)
        ]
        rest = every
        for part in parts:
            rest = _less(rest, part)
        return _changed((), [], [*parts, rest])

    def _counts(self, profiles: Sequence[DeviceProfile]) -> Counts:
        kinds = [
            self._places[name][0]
            for name in {(profile.host, profile.device) for profile in profiles}
        ]
        return tuple(kinds.count(kind) for kind in range(len(self._kinds)))


def fastest(
    predictor: Predictor, profiles: Sequence[DeviceProfile]
) -> list[StageAssignment] | None:
    """The stages of the fastest pipeline over these devices, some of which may be left out."""
    best = None
    speed = 0.0
    for group in (group for zone in zones(profiles) for group in dtype_groups(zone)):
        for shape in shapes(Fleet.of(group), len(predictor.model.layers)):
            stages = shape.fastest(predictor, predictor.busy_s(speed))
            if stages is not None and (found := predictor.predict(stages).tokens_per_s) > speed:
                best = stages
                speed = found
    return best


def shapes(fleet: Fleet, num_layers: int) -> list[PipelineShape]:
    """One pipeline of each number of stages, the longest first; of many unlike devices, numbers as
    far apart as keeps the work within bounds."""
    every = list(fleet.shapes(1, num_layers))
    return every[:: -ceil_div(len(every), max(FEW_SHAPES, MAX_PART_WORK // len(fleet.groups)))]


def partitions(every: Counts, most: Counts | None = None) -> Iterator[Partition]:
    """Yields each partition of these devices into parts, none of which comes behind `most`."""
    if not any(every):
        yield ()
        return
    for part in product(*(range(num, -1, -1) for num in every)):
        if any(part) and (most is None or part <= most):
            for rest in partitions(_less(every, part), part):
                yield (part, *rest)


def _kinds(profiles: Sequence[DeviceProfile]) -> list[list[Device]]:
    """Devices that are alike, on one machine if links are known; the fastest kind first."""
    has_links = any(profile.links for profile in profiles)
    kinds: dict[tuple[int, str], list[Device]] = defaultdict(list)
    for number, group in enumerate(Fleet.of(profiles).groups):
        for device in group:
            kinds[number, device[0].machine if has_links else ""].append(device)
    return sorted(kinds.values(), key=lambda kind: kind[0][0].layers_s)


def _less(one: Counts, other: Counts) -> Counts:
    return tuple(mine - its for mine, its in zip(one, other, strict=True))


def _changed(partition: Partition, gone: Sequence[Counts], come: Sequence[Counts]) -> Partition:
    left = list(partition)
    for part in gone:
        left.remove(part)
    return tuple(sorted([*left, *filter(any, come)], reverse=True))
