"""The search finds what trying everything finds, and is fast enough for large fleets."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, permutations
from random import Random

import pytest

from shardline_costs.step_cost import StageCost, Streaming
from shardline_fleet.planner.search import Counts, DeviceKind, Search, Slice


def cost(random: Random, num_layers: int, *, tight: bool) -> StageCost:
    """A device of random speed with layers of random weight."""
    speed = random.choice([1.0, 1.0, 2.0, 5.0])
    sizes = [random.choice([1.0, 1.0, 3.0]) for _ in range(num_layers)]
    seconds = [0.0]
    memory = [0.0]
    for size in sizes:
        seconds.append(seconds[-1] + size * speed)
        memory.append(memory[-1] + size)
    return StageCost(
        seconds=tuple(seconds),
        stage_s=random.choice([0.0, 0.5]),
        tail_s=random.choice([-0.5, 0.0, 3.0]),
        bytes=tuple(memory),
        least_s=min(sizes) * speed,
        least_bytes=min(sizes),
        head_bytes=2.0,
        tail_bytes=2.0,
        memory_bytes=random.uniform(3, 12) if tight else 1e9,
        streaming=streaming(random, memory) if tight and random.random() < 0.5 else None,
    )


def streaming(random: Random, memory: list[float]) -> Streaming:
    """Of a device that may read what its memory does not hold; a quarter of each layer is KV."""
    kv_bytes = tuple(size / 4 for size in memory)
    return Streaming(
        kv_bytes=kv_bytes,
        buffer_bytes=random.choice([0.0, 2.0]),
        byte_s=random.choice([0.1, 0.5, 2.0]),
    )


def search(seed: int) -> Search:
    """Up to four devices in groups, some of which can be used in two ways."""
    random = Random(seed)
    num_layers = random.randint(2, 7)
    tight = random.random() < 0.5
    counts = random.choice([(1, 1), (2, 1), (1, 1, 1), (2, 2), (3,)])
    kinds = [
        DeviceKind(group=group, cost=cost(random, num_layers, tight=tight))
        for group in range(len(counts))
    ]
    if random.random() < 0.5:
        kinds.append(DeviceKind(group=0, cost=cost(random, num_layers, tight=tight)))
    return Search(kinds, counts)


def everything(search: Search, num_stages: int) -> Iterator[list[Slice]]:
    """Every way to cut the layers over every order of kinds that fits."""
    several = [
        index for index, kind in enumerate(search.kinds) for _ in range(search.counts[kind.group])
    ]
    for bounds in combinations(range(1, search.num_layers), num_stages - 1):
        edges = [0, *bounds, search.num_layers]
        for order in set(permutations(several, num_stages)):
            if within(search, order, search.counts):
                plan = [Slice(kind, *edges[place : place + 2]) for place, kind in enumerate(order)]
                if all(search.kinds[each.kind].cost.fits(each.first, each.stop) for each in plan):
                    yield plan


def within(search: Search, order: tuple[int, ...], counts: Counts) -> bool:
    used = [search.kinds[index].group for index in order]
    return all(used.count(group) <= num for group, num in enumerate(counts))


def total(search: Search, plan: list[Slice]) -> float:
    return sum(search.kinds[each.kind].cost.stage(each.first, each.stop) for each in plan)


def is_whole(plan: list[Slice], num_layers: int) -> bool:
    edges = [0, *(each.stop for each in plan)]
    return edges[-1] == num_layers and [each.first for each in plan] == edges[:-1]


@pytest.mark.parametrize("seed", range(60))
def test_the_least_bottleneck_of_all(seed: int) -> None:
    subject = search(seed)
    for num_stages in range(1, min(sum(subject.counts), subject.num_layers) + 1):
        found = subject.least_bottleneck(num_stages)
        every = [subject.bottleneck(plan) for plan in everything(subject, num_stages)]
        assert (found is None) == (not every)
        if found is not None:
            assert is_whole(found, subject.num_layers)
            assert subject.bottleneck(found) == pytest.approx(min(every))


@pytest.mark.parametrize("seed", range(60))
def test_the_least_sum_of_all(seed: int) -> None:
    subject = search(seed)
    found = subject.least_sum()
    most = min(sum(subject.counts), subject.num_layers)
    every = [
        total(subject, plan) for num in range(1, most + 1) for plan in everything(subject, num)
    ]
    assert (found is None) == (not every)
    if found is not None:
        assert is_whole(found, subject.num_layers)
        assert total(subject, found) == pytest.approx(min(every))


def test_nothing_is_found_below_what_can_be() -> None:
    subject = search(1)
    best = subject.least_bottleneck(2)
    assert best is not None
    assert subject.least_bottleneck(2, below=subject.bottleneck(best)) is None
