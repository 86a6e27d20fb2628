"""How faults are chosen by name, and drawn from a seed. Knows no particular fault and no stack."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

from tests.chaos.faults.fault import Fault, StackT_contra

KILL_SHARE = 0.4

Groups = Mapping[str, Sequence[Fault[StackT_contra]]]


def among(names: str, groups: Groups[StackT_contra]) -> list[Fault[StackT_contra]]:
    """`all`, or groups and words of kinds with commas between them. Raises ValueError for a name
    that fits nothing."""
    found: dict[str, Fault[StackT_contra]] = {}
    for name in (part.strip() for part in names.split(",")):
        fitting = _called(name, groups)
        if not fitting:
            raise ValueError(
                f"no fault is called {name!r}; use all, a group ({', '.join(groups)}) or a kind"
            )
        found |= {fault.kind: fault for fault in fitting}
    return list(found.values())


def _called(name: str, groups: Groups[StackT_contra]) -> list[Fault[StackT_contra]]:
    """A whole kind goes before the kinds that begin with it."""
    everything = [(group, fault) for group, faults in groups.items() for fault in faults]
    whole = [fault for group, fault in everything if name in ("all", group, fault.kind)]
    return whole or [fault for _, fault in everything if fault.kind.startswith(name)]


def drawn(
    faults: Sequence[Fault[StackT_contra]], rng: random.Random
) -> Iterator[Fault[StackT_contra]]:
    """For ever: each kind once in random order, then again, with kills of processes in between."""
    kills = [fault for fault in faults if fault.is_kill]
    while True:
        for fault in rng.sample(faults, len(faults)):
            if kills and not fault.is_kill and rng.random() < KILL_SHARE:
                yield rng.choice(kills)
            yield fault
