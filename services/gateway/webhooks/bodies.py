"""The bodies of the routes for webhook endpoints. The API's description is made from these
types."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shardline.contract.webhooks.event import DELIVERY, ENDPOINT, EventType, object_name
from shardline.contract.webhooks.targets import MAX_URL_CHARS
from shardline.contract.webhooks.webhook_tables import MAX_NAME_CHARS
from shardline.store.webhooks.deliveries import MAX_REPLAYED, DeliveryState, WebhookDelivery
from shardline.store.webhooks.endpoints import EndpointSecret, WebhookEndpoint

UUID_FORM = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"
ENDPOINT_ID = f"^({ENDPOINT})?{UUID_FORM}"
DELIVERY_ID = f"^({DELIVERY})?{UUID_FORM}"
MAX_PAGE = 100

Url = Annotated[str, Meta(min_length=1, max_length=MAX_URL_CHARS)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
EventNames = Annotated[
    list[str], Meta(min_length=1, max_length=64, description="Names, or `job.*`, or `*`")
]


class EndpointRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/webhook_endpoints`."""

    url: Url
    name: Name
    event_types: EventNames


class EndpointUpdate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What becomes another. `enabled` is ours."""

    url: Url | None = None
    name: Name | None = None
    event_types: EventNames | None = None
    enabled: bool | None = None


class RotateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What becomes of the old secret: it ends at once, or signs too for a day."""

    keep_old_secret_active_for_24_hours: bool = False


class EndpointTestRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The event to send a sample of."""

    event_type: EventType


class ReplayRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which deliveries to send again: all that are dead, or these."""

    ids: Annotated[list[str], Meta(min_length=1, max_length=MAX_REPLAYED)] | None = None


class EndpointDocument(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="webhook_endpoint"
):
    """An endpoint. What follows `updated_at` is ours."""

    id: str
    name: str
    url: str
    event_types: list[str]
    signing_secret_hint: str
    created_at: int
    updated_at: int
    enabled: bool
    disabled_reason: str | None
    failing_since: int | None

    @classmethod
    def of(cls, row: WebhookEndpoint) -> EndpointDocument:
        """The row, as it is answered."""
        return cls(**_fields(row))


class EndpointWithSecret(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="webhook_endpoint"
):
    """An endpoint with its secret, which is shown this once."""

    id: str
    name: str
    url: str
    event_types: list[str]
    signing_secret: str
    signing_secret_hint: str
    created_at: int
    updated_at: int
    enabled: bool
    disabled_reason: str | None
    failing_since: int | None

    @classmethod
    def of(cls, made: EndpointSecret) -> EndpointWithSecret:
        """The new row, as it is answered."""
        return cls(**_fields(made.endpoint), signing_secret=made.secret)


class EndpointList(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="list"):
    """All endpoints behind `after`, newest first."""

    data: list[EndpointDocument]
    first_id: str | None
    last_id: str | None
    has_more: bool


class EndpointDeleted(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="webhook_endpoint.deleted"
):
    """The answer to a deletion."""

    id: str
    deleted: bool = True


class EndpointTested(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="webhook_endpoint.test"
):
    """What the endpoint answered to a sample."""

    webhook_endpoint_id: str
    event_type: str
    status_code: int
    success: bool = True


class DeliveryDocument(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="webhook_delivery"
):
    """One event for one endpoint; `id` is its `webhook-id`."""

    id: str
    webhook_endpoint_id: str
    event_type: str
    object_id: str
    state: DeliveryState
    num_attempts: int
    status_code: int | None
    error: str | None
    created_at: int
    next_attempt_at: int | None
    ended_at: int | None

    @classmethod
    def of(cls, row: WebhookDelivery) -> DeliveryDocument:
        """The row, as it is answered."""
        return cls(
            id=f"{DELIVERY}{row.id}",
            webhook_endpoint_id=f"{ENDPOINT}{row.endpoint_id}",
            event_type=row.event_type,
            object_id=object_name(row.event_type, row.object_id),
            state=row.state,
            num_attempts=row.num_attempts,
            status_code=row.status_code,
            error=row.error,
            created_at=int(row.created_at.timestamp()),
            next_attempt_at=None if row.due_at is None else int(row.due_at.timestamp()),
            ended_at=None if row.ended_at is None else int(row.ended_at.timestamp()),
        )


class DeliveryList(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="list"):
    """One page, newest first; `last_id` is `after` of the next one."""

    data: list[DeliveryDocument]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeliveriesReplayed(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="webhook_replay"
):
    """How many will be sent again."""

    replayed: int


class EventTypeList(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="list"):
    """Every event that an endpoint may hear of."""

    data: list[EventType]


class EndpointQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query of `GET /v1/webhook_endpoints`."""

    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 20
    after: Annotated[str, Meta(description="`last_id` of the page before")] | None = None


class DeliveryQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query of an endpoint's deliveries."""

    state: DeliveryState | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 20
    after: Annotated[str, Meta(description="`last_id` of the page before")] | None = None


def _fields(row: WebhookEndpoint) -> dict[str, Any]:
    return {
        "id": f"{ENDPOINT}{row.id}",
        "name": row.name,
        "url": row.url,
        "event_types": list(row.event_types),
        "signing_secret_hint": row.secret_hint,
        "created_at": int(row.created_at.timestamp()),
        "updated_at": int(row.updated_at.timestamp()),
        "enabled": row.disabled_at is None,
        "disabled_reason": row.disabled_reason,
        "failing_since": None if row.failing_since is None else int(row.failing_since.timestamp()),
    }
