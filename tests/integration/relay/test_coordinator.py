"""The coordinator on a real Postgres: a fleet's first plan, another when a worker is missed, none
without need."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import Engine, text
from structlog.testing import capture_logs

from services.relay.coordinator import Coordinator, FleetSnapshot
from services.relay.loop import LoopContext
from shardline.base.config import Times
from shardline.store import fleets
from shardline.store.fleets import FleetPlan, PeerAddress, WorkerOffer
from shardline_fleet.deployment.fleet_planner import Deployment
from shardline_server.metrics import RelayMetrics
from tests.integration.rows import LONG_S, MODEL, change, submit
from tests.unit.fleet.planner.fleets import device, model

TRUST_S = 2 * round(Times().lease_s) + 2
AGES = "UPDATE workers SET joined_at = joined_at - interval '1 hour'"


class Clock:
    """The lease clock of a coordinator, which looks once a second."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.now_s = 0.0
        self._coordinator = coordinator

    def pass_by(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_s += 1.0
            self._coordinator.turn()


@pytest.fixture
def coordinator(engine: Engine) -> Coordinator:
    return Coordinator(
        LoopContext(database=engine, times=Times(), metrics=RelayMetrics(CollectorRegistry()))
    )


@pytest.fixture
def clock(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(coordinator)
    monkeypatch.setattr("services.relay.coordinator.lease_clock_s", lambda: clock.now_s)
    return clock


def join(
    engine: Engine,
    *names: str,
    memory_bytes: int = 1 << 30,
    long_ago: bool = True,
    models: tuple[str, ...] = (MODEL,),
) -> None:
    with engine.begin() as connection:
        for name in names:
            offer = WorkerOffer(shapes=model(), profile=device(name, memory_bytes=memory_bytes))
            fleets.join(connection, name, dict.fromkeys(models, offer), lease_s=LONG_S)
        if long_ago:
            connection.execute(text(AGES))


def plan(engine: Engine, model: str = MODEL) -> FleetPlan:
    with engine.begin() as connection:
        return fleets.plan_of(connection, model)


def test_the_first_plan_waits_until_nobody_joins_any_more(
    engine: Engine, coordinator: Coordinator
) -> None:
    join(engine, "a", "b", long_ago=False)
    coordinator.turn()
    assert plan(engine).version == 0
    join(engine, "c")
    coordinator.turn()
    found = plan(engine)
    assert (found.version, set(found.stages)) == (1, {"a", "b", "c"})
    assert found.split[-1][1] == len(model().layers)


def test_the_first_plan_waits_for_announced_workers_but_not_forever(
    engine: Engine, coordinator: Coordinator
) -> None:
    join(engine, "a")
    with engine.begin() as connection:
        peer = PeerAddress(machine="m", address="tcp://m")
        fleets.announce(connection, "b", [MODEL], lease_s=LONG_S, peer=peer)
    coordinator.turn()
    assert plan(engine).version == 0
    change(engine, AGES)
    coordinator.turn()
    assert set(plan(engine).stages) == {"a"}, "it has no profile still"


@pytest.mark.parametrize(
    ("spoiled", "problem"),
    [
        ("profile = '5'", "no device profile"),
        ("profile = profile - 'layers'", "no device profile"),
        ("profile = jsonb_set(profile, '{memory_bytes}', '\"much\"')", "no device profile"),
        ("profile = jsonb_set(profile, '{layers}', '{}')", "take no time"),
        ("shapes = '{}'", "layers"),
        ("model = 'x', further = jsonb_build_object('m', 5)", "no device profile"),
    ],
)
def test_a_worker_that_no_plan_can_count_is_told_of_and_the_others_are_planned(
    engine: Engine, coordinator: Coordinator, spoiled: str, problem: str
) -> None:
    join(engine, "a", "b", "c")
    join(engine, "d", models=("n",))
    change(engine, f"UPDATE workers SET {spoiled} WHERE worker = 'a'")
    with capture_logs() as logs:
        coordinator.turn()
        coordinator.turn()

    assert set(plan(engine).stages) == {"b", "c"}
    assert set(plan(engine, "n").stages) == {"d"}
    (told,) = [line for line in logs if line["event"] == "a worker is in no plan"]
    assert told["worker"] == "a"
    assert problem in told["problem"]


def test_a_fleet_whose_figures_the_planner_fails_on_stops_no_other_fleet(
    engine: Engine, coordinator: Coordinator
) -> None:
    join(engine, "a")
    join(engine, "d", models=("n",))
    # No such kind of layer was measured.
    change(
        engine,
        "UPDATE workers SET profile = jsonb_set(profile, '{layers}', "
        "jsonb_build_object('other', profile->'layers'->'full_attention')) WHERE worker = 'a'",
    )
    with capture_logs() as logs:
        coordinator.turn()

    assert set(plan(engine, "n").stages) == {"d"}
    assert [line["model"] for line in logs if line["event"] == "fleet cannot be planned"] == [MODEL]


def test_a_fleet_is_cut_anew_when_a_stage_is_missed_and_left_alone_otherwise(
    engine: Engine, coordinator: Coordinator, clock: Clock
) -> None:
    join(engine, "a", "b", "c", memory_bytes=5 << 20)
    coordinator.turn()
    clock.pass_by(TRUST_S)
    before = plan(engine)
    assert len(before.split) > 1, "none of them holds the model"
    coordinator.turn()
    assert plan(engine).version == before.version
    gone = next(
        worker
        for worker, place in before.stages.items()
        if list(before.stages.values()).count(place) == 1
    )
    with engine.begin() as connection:
        fleets.leave(connection, gone)
    coordinator.turn()
    after = plan(engine)
    assert (after.version, set(after.stages)) == (before.version + 1, set(before.stages) - {gone})


def test_a_device_that_drifts_gets_fewer_layers_once_that_pays(
    engine: Engine, coordinator: Coordinator, clock: Clock
) -> None:
    join(engine, "a", "b", memory_bytes=13 << 19)
    clock.pass_by(TRUST_S)
    before = plan(engine)
    slow = next(worker for worker, place in before.stages.items() if place == 0)

    def drift(factor: float) -> FleetPlan:
        with engine.begin() as connection:
            fleets.refresh(
                connection, slow, MODEL, device(slow, memory_bytes=13 << 19).scaled(factor)
            )
        coordinator.turn()
        return plan(engine)

    assert drift(2.0).version == before.version, "the last plan is too new"
    change(engine, "UPDATE plans SET made_at = now() - interval '1 hour'")
    assert drift(1.05).version == before.version, "that would not pay"
    after = drift(2.0)
    assert after.version == before.version + 1
    sizes = {
        worker: after.split[place][1] - after.split[place][0]
        for worker, place in after.stages.items()
    }
    assert sizes[slow] < len(model().layers) / 2


def test_after_a_silence_of_postgres_nobody_is_missed_before_a_lease_has_passed(
    engine: Engine, coordinator: Coordinator, clock: Clock
) -> None:
    join(engine, "a", "b", "c", memory_bytes=5 << 20)
    coordinator.turn()
    clock.pass_by(TRUST_S)
    before = plan(engine)
    clock.now_s += 60
    with engine.begin() as connection:
        fleets.leave(connection, next(iter(before.stages)))
    coordinator.turn()
    assert plan(engine).version == before.version
    clock.pass_by(TRUST_S)
    assert plan(engine).version > before.version


def test_workers_that_do_not_hold_the_model_are_told_of_once(
    engine: Engine, coordinator: Coordinator
) -> None:
    join(engine, "a", memory_bytes=1 << 16)
    with capture_logs() as logs:
        coordinator.turn()
        coordinator.turn()
    assert [(log["event"], log["model"]) for log in logs] == [("fleet cannot be planned", MODEL)]
    assert plan(engine).version == 0


def test_a_model_with_jobs_gets_the_workers_of_one_without_in_one_step(
    engine: Engine, coordinator: Coordinator, clock: Clock
) -> None:
    join(engine, *(workers := {"a", "b", "c"}), memory_bytes=5 << 20, models=(MODEL, "another"))
    submit(engine)
    clock.pass_by(TRUST_S)
    assert set(plan(engine).stages) == workers
    change(engine, "UPDATE jobs SET model = 'another'")
    coordinator.turn()
    assert set(plan(engine).stages) == workers, "its next job may be on the way"
    change(engine, "UPDATE plans SET made_at = now() - interval '1 minute'")
    coordinator.turn()
    assert dict(plan(engine).stages) == {}
    assert set(plan(engine, "another").stages) == workers


def test_of_coordinators_that_move_workers_at_once_one_succeeds(
    engine: Engine, coordinator: Coordinator
) -> None:
    """No worker is in two plans, though each of the two would change other rows."""
    join(engine, "a", "b", models=(MODEL, "another"))
    submit(engine)
    with engine.begin() as connection:
        seen = FleetSnapshot.of(connection)
    coordinator.turn()
    before = plan(engine)
    assert before.version == 1
    stale = Deployment(split=((0, 12),), stages={"a": 0, "b": 0})
    coordinator._store(seen, {"another": stale})  # as if it had been paused since it looked
    assert plan(engine, "another").version == 0
    after = plan(engine)
    assert after == replace(before, age_s=after.age_s)
