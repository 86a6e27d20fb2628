"""The faults of `make chaos-compose`, looked at without an engine: their kinds, and what each service suffers."""

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
def test_given_a_service_when_looked_up_then_everything_happens_to_it(what: str, role: str) -> None:
    assert what.format(role) in {fault.kind for fault in FAULTS}


def test_given_a_seed_when_faults_are_drawn_then_the_same_seed_draws_the_same() -> None:
    def kinds(seed: int) -> list[str]:
        return [fault.kind for fault in itertools.islice(drawn(FAULTS, random.Random(seed)), 100)]

    assert kinds(1) == kinds(1) != kinds(2)
