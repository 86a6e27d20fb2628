"""A tenant's keys in Redis: no two tenants share one, and no name makes a pattern."""

from __future__ import annotations

import pytest

from shardline.base.errors import Invalid
from shardline.contract.keys import INTAKE, INTAKE_DEAD
from shardline.contract.queues import INTAKE_QUEUE
from shardline.contract.tenants.tenant_door import TenantDoor

NAMES = (
    "acme",
    "acme2",
    "a:b",
    "a:tasks",
    "a/b",
    "a b",
    "*",
    "a?",
    "[a]",
    "\\",
    "ä",
    "%3A",
    "dead",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_queue_leads_to_its_tenant_alone(name: str) -> None:
    door = TenantDoor.of(name)
    assert TenantDoor.of_queue(door.tasks) == door
    assert not set("*?[]\\: ^").intersection(door.name)
    others = [TenantDoor.of(other) for other in NAMES if other != name]
    for key in (door.requests, door.tasks, door.results):
        assert not any(
            key.startswith((other.requests, other.tasks, other.results)) for other in others
        )


@pytest.mark.parametrize(
    "queue",
    [INTAKE_QUEUE, INTAKE, INTAKE_DEAD, "shardline:door:a b:tasks", "shardline:door:a:b", None, 5],
)
def test_other_queues_are_of_no_door(queue: object) -> None:
    assert TenantDoor.of_queue(queue) is None


def test_a_name_too_long_for_keys_is_refused() -> None:
    assert TenantDoor.of("x" * 64).name == "x" * 64
    with pytest.raises(Invalid):
        TenantDoor.of("ä" * 64)
