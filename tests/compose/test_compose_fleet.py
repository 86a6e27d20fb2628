"""Workers without a number under Docker Compose: `--scale stage=N` is all that an operator says,
also under load."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.compose.engine import Docker
from tests.compose.load import Load, ends, num_unfinished, once_each, push_on
from tests.compose.stack import Stack, until

pytestmark = pytest.mark.timeout(3600)

NUM_LONG = 16
LONG_TOKENS = 400
READY = "SELECT count(*) FROM pipelines WHERE lease_until > now() AND ready_at IS NOT NULL"
PLANNED = "SELECT count(*) FROM plans, jsonb_object_keys(stages)"
WORKERS = "SELECT count(*) FROM workers WHERE lease_until > now()"


@pytest.fixture(scope="module")
def fleet(docker: Docker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """`docker compose up -d` with the profile cpu: two workers of one core."""
    stack = Stack(
        docker,
        tmp_path_factory.mktemp("fleet"),
        COMPOSE_PROFILES="cpu",
        SHARDLINE_KV_MIB="64",
        SHARDLINE_TIME_SCALE="0.5",
    )
    stack.build()
    try:
        stack.scale()
        until(lambda: stack.number(READY) > 0)
        yield stack
    finally:
        print(stack.compose("logs", "--tail=100"))
        stack.remove()


def test_the_workers_of_the_profile_form_a_fleet_on_devices_of_their_own(fleet: Stack) -> None:
    assert len(fleet.names("stage")) == 2
    until(lambda: fleet.number(PLANNED) == 2)
    devices = fleet.sql("SELECT profile ->> 'device', profile ->> 'host_memory' FROM workers")
    assert len({device for device, _ in devices}) == 2
    assert len({memory for _, memory in devices}) == 1, "containers of one host share its memory"


def test_every_accepted_job_succeeds_once_while_the_fleet_grows_crashes_and_shrinks(
    fleet: Stack,
) -> None:
    with Load(fleet.gateways(), fleet.api_key, seed=11) as load:
        push_on(load)
        fleet.scale(stage=5)
        until(lambda: fleet.number(WORKERS) == 5 and fleet.number(PLANNED) == 5)
        push_on(load)
        for _ in range(NUM_LONG):
            load.push(LONG_TOKENS)
        for name in fleet.names("stage")[:2]:
            fleet.crash(name)
        push_on(load)
        fleet.scale(stage=1)
        until(lambda: fleet.number(WORKERS) == 1 and fleet.number(READY) == 1)
        push_on(load)
    until(lambda: num_unfinished(fleet) == 0)
    assert ends(fleet, load) == once_each(load)
