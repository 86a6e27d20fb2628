"""A tenant whose own locks hold up its requests: its queue of Celery rests, and is read again. Real
Postgres and Redis."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery.app.task import Context
from sqlalchemy import Engine, text

from services.relay.relay import HeldUp, Relay
from services.relay.settings import RelaySettings
from shardline.contract.queues import SUBMIT_TASK
from shardline.contract.tenants.tenant_door import TenantDoor
from shardline.store.tenants import quotas, tenant_doors
from tests.integration.relay.relay_stack import TIME_SCALE
from tests.integration.rows import MODEL, cell, database_with_head
from tests.polling import until

DOOR = TenantDoor.of("acme")
REQUEST = Context(
    id="order-17",
    task=SUBMIT_TASK,
    args=[],
    kwargs={"model": MODEL, "prompt": "one"},
    delivery_info={"routing_key": DOOR.tasks},
)


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    with database_with_head(database_url) as engine:
        with engine.begin() as connection:
            tenant_doors.grant_user(connection, DOOR.tenant, "acme_app")
            quotas.set_quota(connection, DOOR.tenant, {"max_queued": 100})
        yield engine


@pytest.fixture
def relay(engine: Engine, redis_url: str) -> Iterator[Relay]:
    url = engine.url.render_as_string(hide_password=False)
    relay = Relay(
        RelaySettings(
            database_url=url, redis_url=redis_url, metrics_port=None, time_scale=TIME_SCALE
        )
    )
    relay.start()
    yield relay
    relay.stop()


def test_the_queue_of_a_tenant_that_holds_itself_up_rests(engine: Engine, relay: Relay) -> None:
    until(lambda: DOOR in relay.doors)
    with engine.begin() as connection:
        connection.execute(text("SELECT FROM quota_use FOR UPDATE"))
        with pytest.raises(HeldUp):
            relay.submit(REQUEST)
        assert DOOR not in relay.doors
    until(lambda: DOOR in relay.doors)
    relay.submit(REQUEST)
    assert cell(engine, "SELECT tenant_id FROM jobs") == DOOR.tenant
