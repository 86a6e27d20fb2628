"""What a stack's servers are asked and what breaks first as the fleet grows."""

from __future__ import annotations

from shardline_fleet.simulator.server_load import FleetRates, server_loads


def fleet(stages: int) -> FleetRates:
    return FleetRates(
        stages=stages,
        heads=stages / 4,
        running=10 * stages,
        jobs_per_s=stages / 10,
        tokens_per_s=50.0 * stages,
    )


def amounts(stages: int) -> dict[str, float]:
    return {f"{load.server}: {load.what}": load.amount for load in server_loads(fleet(stages))}


def broken(stages: int) -> list[str]:
    return [f"{load.server}: {load.what}" for load in server_loads(fleet(stages)) if load.breaks]


def test_a_fleet_of_a_thousand_stages() -> None:
    found = amounts(1000)
    assert found["Postgres: connections of stages"] == 1750
    assert found["Postgres: transactions"] == 500 + 500 + 300
    assert found["Postgres: rows that heartbeats write"] == 20_000


def test_looks_for_free_stages_grow_with_the_square_of_the_fleet() -> None:
    name = "Redis: looks after a tenth was lost"
    assert amounts(2000)[name] == 4 * amounts(1000)[name]


def test_connections_break_first_then_coordinators_and_redis() -> None:
    assert broken(50) == []
    assert broken(100) == ["Postgres: connections of stages"]
    assert "relay: a coordinator's looks" in broken(1100)
    assert "Redis: cards, of which a look sees" in broken(5000)
