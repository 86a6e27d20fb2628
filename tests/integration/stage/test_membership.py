"""A worker's membership on a real Postgres: a device that has drifted changes its row."""

from __future__ import annotations

from sqlalchemy import Engine

from services.stage.fleet.membership import Membership
from shardline.base.config import Times
from shardline.store import fleets
from shardline.store.fleets import PeerAddress, WorkerOffer
from shardline_costs import DeviceProfile
from shardline_costs.drift import NUM_WINDOWS, WINDOW_STEPS, Drift
from shardline_scheduler.step_plan import Row, StepPlan
from tests.integration.rows import MODEL
from tests.polling import until
from tests.unit.fleet.planner.fleets import LAYER_S, device, model

PLAN = StepPlan(0, (), (Row(1, 9, 1, (5,), (), wants=True),), ())


def test_a_worker_whose_steps_take_twice_as_long_tells_the_plan(engine: Engine) -> None:
    profile = device("a:0")
    told = list[DeviceProfile]()
    membership = Membership(
        engine, "a", Times().scaled(0.1), [MODEL], PeerAddress(machine="x", address="tcp://a")
    )
    membership.announce()
    membership.join_fleet({MODEL: WorkerOffer(shapes=model(), profile=profile)})
    with engine.begin() as connection:
        fleets.store_plan(
            connection, MODEL, version=0, split=[(0, 12)], stages={"a": 0}, tokens_per_s=None
        )
    layers = range(*membership.wait_for_layers().layers)
    drift = Drift(profile, model(), layers, window_s=0.0)
    for _ in range(NUM_WINDOWS * WINDOW_STEPS):
        drift.add(PLAN, 2 * len(layers) * LAYER_S)
    membership.watch(drift, told.append)
    until(lambda: len(told) == 1)
    membership.leave()
    with engine.begin() as connection:
        (row,) = fleets.workers_of(connection, MODEL)
    rows = row.profile["layers"]["full_attention"]["rows"]
    assert rows[0] == [1.0, told[0].layers["full_attention"].rows[0][1]]
    assert 1.9 * LAYER_S < rows[0][1] < 2.1 * LAYER_S
