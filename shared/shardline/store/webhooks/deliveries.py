"""What webhook endpoints are to hear, as doors see it: listed, replayed, tried. Sends nothing.

`tenant` None is anybody's.
Locks: rows of `webhook_deliveries`, in order of id.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Literal
from uuid import UUID

import msgspec
from sqlalchemy import Connection, text

from shardline.base.errors import Conflict, Invalid
from shardline.contract.ids import new_id, parse_id
from shardline.contract.tables import TASKS_CHANNEL, WEBHOOKS
from shardline.contract.webhooks.event import DELIVERY, EventType
from shardline.store.connection.notify import ring
from shardline.store.webhooks.endpoints import get_endpoint

MAX_REPLAYED = 1_000
"""In one call, which locks and writes all rows in one statement."""

DeliveryState = Literal["pending", "delivered", "dead"]

COLUMNS = """id, endpoint_id, event_type, object_id, state, num_attempts, status_code, error,
    is_test, created_at, due_at, ended_at"""

# The limit is a literal, so that the planner walks webhook_deliveries_listing.
PAGE = f"""
SELECT {COLUMNS} FROM webhook_deliveries
WHERE endpoint_id = :endpoint_id AND state = coalesce(:state, state) {{rules}}
ORDER BY created_at DESC, id DESC LIMIT {{limit}}
"""  # noqa: S608 (a constant of ours)
BEHIND = """AND (created_at, id) < (
    SELECT created_at, id FROM webhook_deliveries
    WHERE id = :after AND endpoint_id = :endpoint_id)"""
IS_THERE = text("SELECT true FROM webhook_deliveries WHERE id = :id AND endpoint_id = :endpoint_id")
READ = text(f"SELECT {COLUMNS} FROM webhook_deliveries WHERE id = :id")  # noqa: S608 (a constant)
REPLAY = text("""
-- Those that have ended: the named ones, or all that are dead, the oldest first.
WITH wanted AS (
    SELECT id FROM webhook_deliveries
    WHERE endpoint_id = :endpoint_id AND NOT is_test
        AND CASE WHEN CAST(:ids AS uuid[]) IS NULL THEN state = 'dead'
            ELSE state <> 'pending' AND id = ANY(CAST(:ids AS uuid[])) END
    ORDER BY created_at, id LIMIT :max_rows
),
-- No relay records them meanwhile.
locked AS (
    SELECT id FROM webhook_deliveries WHERE id IN (SELECT id FROM wanted) AND state <> 'pending'
    ORDER BY id FOR UPDATE
)
UPDATE webhook_deliveries SET state = 'pending', due_at = now(), ended_at = NULL, num_attempts = 0
FROM locked WHERE webhook_deliveries.id = locked.id AND state <> 'pending'
RETURNING webhook_deliveries.id
""")
ADD_TEST = text("""
INSERT INTO webhook_deliveries (id, endpoint_id, event_type, object_id, is_test)
VALUES (:id, :endpoint_id, :event_type, :object_id, true)
""")
FORGET_TEST = text("DELETE FROM webhook_deliveries WHERE id = :id AND is_test")


class WebhookDelivery(msgspec.Struct, frozen=True, kw_only=True):
    """One event for one endpoint."""

    id: UUID
    endpoint_id: UUID
    event_type: str
    object_id: UUID
    """The job or batch that has ended."""
    state: DeliveryState
    num_attempts: int
    """Since it was replayed, if it was."""
    status_code: int | None
    error: str | None
    is_test: bool
    created_at: datetime
    due_at: datetime | None
    """The next attempt; None once it has ended."""
    ended_at: datetime | None


def list_deliveries(
    connection: Connection,
    endpoint_id: UUID,
    *,
    tenant: str | None,
    state: DeliveryState | None = None,
    limit: int,
    after: UUID | None = None,
) -> tuple[list[WebhookDelivery], bool]:
    """Returns a page of an endpoint's deliveries behind `after`, newest first, and whether there
    are more. Raises NotFound, and Invalid for an `after` that is not there."""
    get_endpoint(connection, endpoint_id, tenant=tenant)
    values = {"endpoint_id": endpoint_id, "state": state, "after": after, "id": after}
    if after is not None and connection.scalar(IS_THERE, values) is None:
        raise Invalid("after", f"there is no delivery {DELIVERY}{after}", "List from the start")
    query = PAGE.format(rules="" if after is None else BEHIND, limit=limit + 1)
    rows = connection.execute(text(query), values).mappings()
    found = [WebhookDelivery(**row) for row in rows]
    return found[:limit], len(found) > limit


def replay(
    connection: Connection,
    endpoint_id: UUID,
    ids: Sequence[UUID] | None = None,
    *,
    tenant: str | None,
) -> int:
    """Sends deliveries again that have ended, under the same id: those named, or all that are
    dead, at most MAX_REPLAYED. Returns how many. Raises NotFound, Invalid, and Conflict where the
    endpoint is disabled."""
    if ids is not None and len(ids) > MAX_REPLAYED:
        problem = f"there are {len(ids)}; {MAX_REPLAYED} is the limit"
        raise Invalid("ids", problem, "Send fewer at a time")
    _check_enabled(connection, endpoint_id, tenant)
    values = {
        "endpoint_id": endpoint_id,
        "ids": None if ids is None else list(ids),
        "max_rows": MAX_REPLAYED,
    }
    replayed = connection.execute(REPLAY, values).all()
    if replayed:
        ring(connection, TASKS_CHANNEL, WEBHOOKS)
    return len(replayed)


def begin_test(
    connection: Connection, endpoint_id: UUID, event_type: EventType, *, tenant: str | None
) -> UUID:
    """Has relays send a sample once, and returns its delivery. Raises NotFound, and Conflict where
    the endpoint is disabled."""
    _check_enabled(connection, endpoint_id, tenant)
    delivery_id = new_id()
    sample = {
        "id": delivery_id,
        "endpoint_id": endpoint_id,
        "event_type": event_type.value,
        "object_id": new_id(),
    }
    connection.execute(ADD_TEST, sample)
    ring(connection, TASKS_CHANNEL, WEBHOOKS)
    return delivery_id


def end_test(connection: Connection, delivery_id: UUID, *, is_last: bool) -> WebhookDelivery | None:
    """A sample that was sent; None as long as it was not. After the last look it will not be
    sent."""
    row = connection.execute(READ, {"id": delivery_id}).mappings().first()
    found = None if row is None else WebhookDelivery(**row)
    is_sent = found is not None and found.state != "pending"
    if is_last and not is_sent:
        connection.execute(FORGET_TEST, {"id": delivery_id})
    return found if is_sent else None


def delivery_id_of(name: str, field: str) -> UUID:
    """Reads an id as clients send it. Raises Invalid, naming `field`."""
    return parse_id(name.removeprefix(DELIVERY), field)


def _check_enabled(connection: Connection, endpoint_id: UUID, tenant: str | None) -> None:
    endpoint = get_endpoint(connection, endpoint_id, tenant=tenant)
    if endpoint.disabled_reason is not None:
        raise Conflict(f"the endpoint is disabled ({endpoint.disabled_reason}); enable it first")
