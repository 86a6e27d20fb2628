"""What a stack's servers are asked: by the product's own intervals, and in proportion to the fleet."""

from __future__ import annotations

from services.relay import coordinator
from services.simulator import cell, server_load
from services.simulator.server_load import FleetRates, server_loads
from services.stage import membership
from services.stage.pipeline import registry
from shardline import keys
from shardline.store import fleets

FLEET = FleetRates(stages=1000, heads=250, running=10_000, jobs_per_s=100, tokens_per_s=50_000, worker_bytes=8_000)


def amounts(fleet: FleetRates) -> dict[str, float]:
    return {f"{load.server} {load.what.partition(' (')[0]}": load.amount for load in server_loads(fleet)}


def test_intervals_are_those_of_the_product() -> None:
    assert server_load.BEATS_IN_LEASE == membership.BEATS_IN_LEASE
    assert server_load.RENEWALS_IN_TTL == keys.REGISTRY_TTL_S / registry.RENEW_S
    assert cell.WORKER_LEASES == fleets.LEASES
    assert cell.COOL_DOWN_S == coordinator.COOL_DOWN_POLLS


def test_a_fleet_of_a_thousand_stages() -> None:
    found = amounts(FLEET)
    assert found["postgres transactions: heartbeats of heads"] == 500
    assert found["postgres transactions: beats of workers"] == 500
    assert found["postgres rows written: jobs and attempts by heartbeats"] == 20_000
    assert found["postgres connections of stages"] == 1750
    assert found["redis commands: cards"] == 3000
    assert found["redis commands: stream entries"] == 50_000


def test_reading_the_plan_grows_with_the_square_of_the_fleet() -> None:
    twice = FleetRates(stages=2000, heads=500, running=20_000, jobs_per_s=200, tokens_per_s=100_000, worker_bytes=8_000)
    one, two = amounts(FLEET), amounts(twice)
    name = "postgres plan read by beats of workers"
    assert two[name] == 4 * one[name]
    assert two["redis commands: cards"] == 2 * one["redis commands: cards"]
