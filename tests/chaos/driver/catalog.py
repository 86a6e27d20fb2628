"""All faults of a stack of local processes, by group. Knows no stack."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tests.chaos.driver.drawing import among
from tests.chaos.faults import (
    adapter_faults,
    client_faults,
    clock_faults,
    deploy_faults,
    disk_faults,
    failover_faults,
    failpoint_faults,
    fleet_faults,
    frame_faults,
    kill_faults,
    lease_faults,
    link_faults,
    memory_faults,
    message_faults,
    migration_faults,
    network_faults,
    poison_faults,
    postgres_faults,
    prefill_faults,
    redis_faults,
    release_faults,
    scale_faults,
    stall_faults,
    weights_faults,
)
from tests.chaos.faults.fault import Fault

GROUPS: Mapping[str, tuple[Fault, ...]] = MappingProxyType(
    {
        "kill": kill_faults.FAULTS,
        "failpoint": failpoint_faults.FAULTS,
        "redis": redis_faults.FAULTS,
        "postgres": postgres_faults.FAULTS,
        "failover": failover_faults.FAULTS,
        "link": link_faults.FAULTS,
        "client": client_faults.FAULTS,
        "network": network_faults.FAULTS,
        "clock": clock_faults.FAULTS,
        "messages": message_faults.FAULTS,
        "deploy": deploy_faults.FAULTS,
        "disk": disk_faults.FAULTS,
        "poison": poison_faults.FAULTS,
        "weights": weights_faults.FAULTS,
        "scale": scale_faults.FAULTS,
        "migration": migration_faults.FAULTS,
        "lease": lease_faults.FAULTS,
        "frames": frame_faults.FAULTS,
        "stall": stall_faults.FAULTS,
        "memory": memory_faults.FAULTS,
        "release": release_faults.FAULTS,
        "prefill": prefill_faults.FAULTS,
        "fleet": fleet_faults.FAULTS,
        "adapter": adapter_faults.FAULTS,
    }
)


def chosen(names: str) -> list[Fault]:
    """See `among`."""
    return among(names, GROUPS)
