"""Devices in groups of equal ones, and the best plan for each number of replicas and stages over
them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise

import msgspec

from shardline_costs.device_profile import DeviceProfile
from shardline_costs.prediction import Predictor, StageAssignment
from shardline_costs.step_cost import StageCost, stage_cost
from shardline_fleet.planner.search import DeviceKind, Search, Slice

FEW_STAGES = 16
"""Any two of these are tried in exchanged places."""
ALIKE = 0.05
"""Devices of equal hardware with figures that differ by less of their value are one group."""
Device = tuple[DeviceProfile, ...]
"""Its profiles, one for each way to use it, in order of these."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Devices with activations of one dtype, so that any of them may stand in one pipeline."""

    groups: tuple[tuple[Device, ...], ...]

    @classmethod
    def of(cls, profiles: Sequence[DeviceProfile]) -> Fleet:
        """Groups what is alike."""
        devices: dict[tuple[str, str], list[DeviceProfile]] = defaultdict(list)
        # Stages next to each other take devices next to each other.
        for profile in sorted(profiles, key=lambda profile: profile.machine):
            devices[profile.host, profile.device].append(profile)
        groups: list[list[Device]] = []
        for ways in devices.values():
            device = tuple(sorted(ways, key=lambda profile: profile.way))
            group = next((each for each in groups if _are_alike(each[0], device)), None)
            if group is None:
                groups.append([device])
            else:
                group.append(device)
        return cls(tuple(map(tuple, groups)))

    @property
    def num_devices(self) -> int:
        """Returns the number of devices of all groups."""
        return sum(map(len, self.groups))

    def shapes(
        self, replicas: int, num_layers: int, num_stages: int | None = None
    ) -> Iterator[PipelineShape]:
        """Yields `replicas` replicas of every number of stages, or of one, that these devices and
        layers allow."""
        counts = tuple(len(group) // replicas for group in self.groups)
        for num in range(1, min(sum(counts), num_layers) + 1):
            if num_stages in (None, num):
                yield PipelineShape(self, replicas, num, counts)


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """A number of replicas, with a number of stages each, over a fleet."""

    fleet: Fleet
    replicas: int
    num_stages: int
    counts: tuple[int, ...]
    """Devices of each group in each replica."""

    def fastest(
        self, predictor: Predictor, below: float = float("inf")
    ) -> list[StageAssignment] | None:
        """Returns the stages of which the slowest is busy for the shortest time under the load;
        None if none is faster than `below`, in seconds, or none fits."""
        search = self._search(lambda profile: predictor.cost(profile, self.num_stages))
        return self._assigned(search.least_bottleneck(self.num_stages, below))

    def fits(self, predictor: Predictor) -> bool:
        """Whether the devices hold the model and the KV of the load in any split."""
        search = self._search(lambda profile: predictor.cost(profile, self.num_stages))
        return search.fits(self.num_stages)

    def first(self, predictor: Predictor) -> list[StageAssignment] | None:
        """The stages through which a request alone goes fastest, whatever their number; None if
        none fits."""
        model = predictor.model
        load = predictor.load
        search = self._search(
            lambda profile: stage_cost(
                profile, model, load.alone(), load.kv_tokens, sequences=load.concurrency
            )
        )
        return self._assigned(search.least_sum())

    def _ways(self) -> list[tuple[int, DeviceProfile]]:
        """Group and profile of each kind of the search."""
        return [(number, way) for number, group in enumerate(self.fleet.groups) for way in group[0]]

    def _search(self, cost: Callable[[DeviceProfile], StageCost]) -> Search:
        return Search(
            [DeviceKind(group=group, cost=cost(profile)) for group, profile in self._ways()],
            self.counts,
        )

    def _assigned(self, found: Sequence[Slice] | None) -> list[StageAssignment] | None:
        """Assigns separate devices to each stage of each replica."""
        if found is None:
            return None
        ways = self._ways()
        used = Counter[int]()
        stages = []
        for placed in found:
            group, way = ways[placed.kind]
            number = self.fleet.groups[group][0].index(way)
            devices = self.fleet.groups[group][used[group] : used[group] + self.replicas]
            used[group] += self.replicas
            stages.append(
                StageAssignment(
                    tuple(device[number] for device in devices), placed.first, placed.stop
                )
            )
        return stages


def dtype_groups(profiles: Sequence[DeviceProfile]) -> list[list[DeviceProfile]]:
    """Groups profiles of which the stages may stand in one pipeline."""
    by_dtype: dict[str, list[DeviceProfile]] = defaultdict(list)
    for profile in profiles:
        by_dtype[profile.activation_dtype].append(profile)
    return list(by_dtype.values())


def neighbors(stages: Sequence[StageAssignment]) -> Iterator[list[StageAssignment]]:
    """Yields the same pipeline with one layer moved to the next stage or from it, and with two
    unlike devices that change places: next to each other, or anywhere if links are known and stages
    are few."""
    yield from moved(stages)
    has_links = any(device.links for stage in stages for device in stage.devices)
    furthest = len(stages) if has_links and len(stages) <= FEW_STAGES else 1
    for place, other in _unlike(stages):
        if other - place <= furthest:
            swapped = list(stages)
            swapped[place] = stages[place]._replace(devices=stages[other].devices)
            swapped[other] = stages[other]._replace(devices=stages[place].devices)
            yield swapped


def moved(stages: Sequence[StageAssignment]) -> Iterator[list[StageAssignment]]:
    """Yields the same pipeline with one layer moved to the next stage or from it."""
    for place, (left, right) in enumerate(pairwise(stages)):
        for bound in (left.stop - 1, left.stop + 1):
            if left.first < bound < right.stop:
                yield [
                    *stages[:place],
                    left._replace(stop=bound),
                    right._replace(first=bound),
                    *stages[place + 2 :],
                ]


def reordered(stages: Sequence[StageAssignment]) -> Iterator[list[StageAssignment]]:
    """Yields the same pipeline with two unlike devices that change places, each with as many layers
    as it had."""
    for place, other in _unlike(stages):
        carried = list(stages)
        carried[place], carried[other] = stages[other], stages[place]
        ends = accumulate(stage.stop - stage.first for stage in carried)
        yield [
            stage._replace(first=end - stage.stop + stage.first, stop=end)
            for stage, end in zip(carried, ends, strict=True)
        ]


def _unlike(stages: Sequence[StageAssignment]) -> Iterator[tuple[int, int]]:
    """Yields the places of any two stages that would not be the same with their places
    exchanged."""
    for (place, left), (other, right) in combinations(enumerate(stages), 2):
        if not _are_same_in_place(left, right):
            yield place, other


def _are_same_in_place(left: StageAssignment, right: StageAssignment) -> bool:
    """Whether nothing would be different."""
    machines = [[device.machine for device in stage.devices] for stage in (left, right)]
    return machines[0] == machines[1] and _are_alike((left.profile,), (right.profile,))


def share_memory(profiles: Sequence[DeviceProfile]) -> list[DeviceProfile]:
    """The devices of a host that work in its memory get equal parts of it."""
    devices = {(each.host_memory, each.host, each.device) for each in profiles}
    num = Counter(memory for memory, _, _ in devices)
    return [
        each
        if each.host_memory is None
        else msgspec.structs.replace(each, memory_bytes=each.memory_bytes // num[each.host_memory])
        for each in profiles
    ]


def _are_alike(one: Device, other: Device) -> bool:
    if [(each.way, each.hardware) for each in one] != [(each.way, each.hardware) for each in other]:
        return False
    return all(
        _are_near(a.memory_bytes, b.memory_bytes) and _are_near(a.layers_s, b.layers_s)
        for a, b in zip(one, other, strict=True)
    )


def _are_near(one: float, other: float) -> bool:
    return abs(one - other) <= ALIKE * max(one, other)
