"""All faults, and how they are drawn. Knows no stack."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from tests.faults import (
    client_faults,
    clock_faults,
    deploy_faults,
    disk_faults,
    failpoint_faults,
    kill_faults,
    link_faults,
    message_faults,
    network_faults,
    poison_faults,
    postgres_faults,
    redis_faults,
    weights_faults,
)
from tests.faults.fault import Fault

GROUPS: Mapping[str, tuple[Fault, ...]] = MappingProxyType(
    {
        "kill": kill_faults.FAULTS,
        "failpoint": failpoint_faults.FAULTS,
        "redis": redis_faults.FAULTS,
        "postgres": postgres_faults.FAULTS,
        "link": link_faults.FAULTS,
        "client": client_faults.FAULTS,
        "network": network_faults.FAULTS,
        "clock": clock_faults.FAULTS,
        "messages": message_faults.FAULTS,
        "deploy": deploy_faults.FAULTS,
        "disk": disk_faults.FAULTS,
        "poison": poison_faults.FAULTS,
        "weights": weights_faults.FAULTS,
    }
)
KILL_SHARE = 0.4


def chosen(names: str) -> list[Fault]:
    """`all`, or groups and words of kinds with commas between them. Raises ValueError for a name that fits nothing."""
    found: dict[str, Fault] = {}
    for name in (part.strip() for part in names.split(",")):
        fitting = _called(name)
        if not fitting:
            raise ValueError(f"no fault is called {name!r}; use all, a group ({', '.join(GROUPS)}) or a kind")
        found |= {fault.kind: fault for fault in fitting}
    return list(found.values())


def _called(name: str) -> list[Fault]:
    """A whole kind goes before the kinds that begin with it."""
    everything = [(group, fault) for group, faults in GROUPS.items() for fault in faults]
    whole = [fault for group, fault in everything if name in ("all", group, fault.kind)]
    return whole or [fault for _, fault in everything if fault.kind.startswith(name)]


def drawn(faults: Sequence[Fault], rng: random.Random) -> Iterator[Fault]:
    """For ever: each kind once in random order, then again, with kills of processes in between."""
    kills = [fault for fault in faults if fault.is_kill]
    while True:
        for fault in rng.sample(faults, len(faults)):
            if kills and not fault.is_kill and rng.random() < KILL_SHARE:
                yield rng.choice(kills)
            yield fault
