"""The faults of `make chaos-compose`, looked at without an engine: their kinds, and what each
service suffers."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.chaos.driver.drawing import among, drawn
from tests.compose.container_faults import GROUPS, ROLES

FAULTS = among("all", GROUPS)


def test_no_two_faults_share_a_kind_and_no_kind_has_a_comma() -> None:
    assert len(FAULTS) == sum(len(faults) for faults in GROUPS.values())
    assert [fault.kind for fault in FAULTS if "," in fault.kind] == []


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    "what",
    [
        "docker kill {}",
        "crash {}",
        "docker pause {} 0.5 leases",
        "docker pause {} 1.5 leases",
        "docker pause {} 5 leases",
        "network disconnect {}",
        "docker restart {}",
    ],
)
def test_every_kind_of_fault_happens_to_each_service(what: str, role: str) -> None:
    assert what.format(role) in {fault.kind for fault in FAULTS}


def test_one_seed_draws_the_same_faults() -> None:
    def kinds(seed: int) -> list[str]:
        return [fault.kind for fault in itertools.islice(drawn(FAULTS, random.Random(seed)), 100)]

    assert kinds(1) == kinds(1) != kinds(2)
