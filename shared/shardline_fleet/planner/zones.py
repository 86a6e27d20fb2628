"""Zones: machines that are near each other by what their links measured. Knows no search."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from shardline_costs.device_profile import DeviceProfile

NEARER = 4.0
"""Links of one level are at most by this factor slower than the fastest of them."""
MAX_ZONES = 16


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
    most_s = max(latencies.values())
    yield from (frozenset({machine}) for machine in members)
    while limit_s < most_s:
        limit_s *= NEARER
        near = {pair for pair, latency_s in latencies.items() if latency_s <= limit_s}
        left = set(members)
        while left:
            cluster = _joined(left.pop(), near)
            left -= cluster
            yield cluster


def _joined(machine: str, near: set[tuple[str, str]]) -> frozenset[str]:
    """All machines that are reached from this one."""
    found = {machine}
    new = {machine}
    while new:
        new = {other for pair in near if new & set(pair) for other in pair} - found
        found |= new
    return frozenset(found)
