"""Which devices are alike, which are near each other, and which share a memory. Knows no search."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import msgspec

from shardline_fleet.planner.device_profile import DeviceProfile
from shardline_fleet.planner.prediction import StageAssignment

ALIKE = 0.05
"""Devices of equal hardware with figures that differ by less of their value are one kind."""
NEARER = 4.0
"""Links of one level are at most by this factor slower than the fastest of them."""
MAX_ZONES = 16
Device = tuple[DeviceProfile, ...]
"""Its profiles, one for each way to use it, in order of these."""
Counts = tuple[int, ...]
"""Devices of each kind."""


@dataclass(frozen=True, slots=True)
class DeviceKinds:
    """Devices in kinds of alike ones."""

    kinds: Sequence[Sequence[Device]]

    @classmethod
    def of(cls, profiles: Sequence[DeviceProfile], *, by_machine: bool = False) -> DeviceKinds:
        """Groups what is alike, on one machine if links are known and `by_machine`; the fastest
        kind comes first."""
        devices: dict[tuple[str, str], list[DeviceProfile]] = defaultdict(list)
        # Stages next to each other take devices next to each other.
        for profile in sorted(profiles, key=lambda profile: profile.machine):
            devices[profile.host, profile.device].append(profile)
        by_machine = by_machine and any(profile.links for profile in profiles)
        kinds: list[list[Device]] = []
        for ways in devices.values():
            device = tuple(sorted(ways, key=lambda profile: profile.way))
            for kind in kinds:
                is_near = not by_machine or kind[0][0].machine == device[0].machine
                if is_near and are_alike(kind[0], device):
                    kind.append(device)
                    break
            else:
                kinds.append([device])
        return cls(sorted(kinds, key=lambda kind: kind[0][0].layers_s))

    @property
    def counts(self) -> Counts:
        """Returns the number of devices of each kind."""
        return tuple(map(len, self.kinds))

    @property
    def ways(self) -> list[tuple[int, DeviceProfile]]:
        """Returns each way to use the devices of each kind, with the kind."""
        return [(number, way) for number, kind in enumerate(self.kinds) for way in kind[0]]

    def part(self, replicas: int) -> Counts:
        """Returns the devices of each kind in each of `replicas` equal parts."""
        return tuple(num // replicas for num in self.counts)

    def counted(self, profiles: Sequence[DeviceProfile]) -> Counts:
        """Counts the devices that these profiles are of, by kind."""
        names = {(profile.host, profile.device) for profile in profiles}
        return tuple(
            sum((device[0].host, device[0].device) in names for device in kind)
            for kind in self.kinds
        )

    def first(self, counts: Counts) -> list[DeviceProfile]:
        """Returns all ways to use the first devices of each kind."""
        return [
            way
            for kind, num in zip(self.kinds, counts, strict=True)
            for device in kind[:num]
            for way in device
        ]

    def dealt(
        self, stages: Sequence[StageAssignment], part: Counts, replicas: int, used: Counts
    ) -> list[StageAssignment]:
        """Returns stages over the first devices of a part for each of its replicas, behind those
        that are used."""
        places = {
            (way.host, way.device, way.way): (kind, place, number)
            for kind, devices in enumerate(self.kinds)
            for place, device in enumerate(devices)
            for number, way in enumerate(device)
        }
        found = []
        for stage in stages:
            profile = stage.profile
            kind, place, number = places[profile.host, profile.device, profile.way]
            begin = used[kind] + place
            devices = self.kinds[kind][begin : begin + replicas * part[kind] : part[kind]]
            found.append(stage._replace(devices=tuple(device[number] for device in devices)))
        return found


def are_alike(one: Device, other: Device) -> bool:
    """Whether two devices may take each other's place."""
    if [(each.way, each.hardware) for each in one] != [(each.way, each.hardware) for each in other]:
        return False
    return all(
        _are_near(a.memory_bytes, b.memory_bytes) and _are_near(a.layers_s, b.layers_s)
        for a, b in zip(one, other, strict=True)
    )


def _are_near(one: float, other: float) -> bool:
    return abs(one - other) <= ALIKE * max(one, other)


def share_memory(profiles: Sequence[DeviceProfile]) -> list[DeviceProfile]:
    """Gives the devices of a host that work in its memory equal parts of it."""
    devices = {(each.host_memory, each.host, each.device) for each in profiles}
    num = Counter(memory for memory, _, _ in devices)
    return [
        each
        if each.host_memory is None
        else msgspec.structs.replace(each, memory_bytes=each.memory_bytes // num[each.host_memory])
        for each in profiles
    ]


def dtype_groups(profiles: Sequence[DeviceProfile]) -> list[list[DeviceProfile]]:
    """Groups profiles of which the stages may stand in one pipeline."""
    by_dtype: dict[str, list[DeviceProfile]] = defaultdict(list)
    for profile in profiles:
        by_dtype[profile.activation_dtype].append(profile)
    return list(by_dtype.values())


def zones(profiles: Sequence[DeviceProfile]) -> list[list[DeviceProfile]]:
    """All devices; then, where links are of unlike latency, those of machines that are near each
    other, large zones first: a pipeline within one may be faster than one over all."""
    members: dict[str, DeviceProfile] = {}
    for profile in profiles:
        known = members.setdefault(profile.machine, profile)
        if len(profile.links) > len(known.links):
            members[profile.machine] = profile
    found = sorted(set(_clusters(members)), key=lambda machines: (-len(machines), sorted(machines)))
    smaller = [each for each in found if len(each) < len(members)][: MAX_ZONES - 1]
    return [
        list(profiles),
        *([profile for profile in profiles if profile.machine in zone] for zone in smaller),
    ]


def _clusters(members: Mapping[str, DeviceProfile]) -> Iterator[frozenset[str]]:
    """Yields the machines that are joined by links below each limit, which grows by NEARER."""
    latencies = {
        (one, other): latency_s
        for one, other in combinations(sorted(members), 2)
        if (latency_s := members[one].link(members[other]).latency_s) > 0
    }
    if not latencies:
        return
    limit_s = min(latencies.values())
    yield from (frozenset({machine}) for machine in members)
    while limit_s < max(latencies.values()):
        limit_s *= NEARER
        clusters = {machine: frozenset({machine}) for machine in members}
        for (one, other), latency_s in latencies.items():
            if latency_s <= limit_s:
                joined = clusters[one] | clusters[other]
                clusters |= dict.fromkeys(joined, joined)
        yield from clusters.values()
