"""Webhook endpoints as rows: made, listed, changed, rotated, deleted. Shows a secret once, to
its creator.

`tenant` None is anybody's: of commands, which may read the tables anyway.
Locks: the tenant's row to count its endpoints; else one row of `webhook_endpoints`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import Connection, RowMapping, text

from shardline.base.errors import Conflict, Invalid, NotFound
from shardline.contract.ids import new_id, parse_id
from shardline.contract.job import DEFAULT_TENANT
from shardline.contract.webhooks.event import (
    ENDPOINT,
    event_types,
    new_secret,
    secret_hint,
)
from shardline.contract.webhooks.targets import WebhookReach, check_url
from shardline.contract.webhooks.webhook_tables import MAX_NAME_CHARS
from shardline.store.tenants.quotas import add_tenant

MAX_ENDPOINTS = 16
"""Of a tenant: each end of one of its jobs may write a row for each endpoint."""

DAY_S = 86_400.0
BY_OWNER = "disabled by its owner"

COLUMNS = """id, tenant_id AS tenant, name, url, event_types, secret, created_at, updated_at,
    failing_since, disabled_at, disabled_reason"""

# FOR NO KEY UPDATE: jobs of the tenant are inserted meanwhile.
LOCK_TENANT = text("SELECT id FROM tenants WHERE id = :tenant FOR NO KEY UPDATE")
COUNT = text("SELECT count(*) FROM webhook_endpoints WHERE tenant_id = :tenant")
INSERT = text(f"""
INSERT INTO webhook_endpoints (id, tenant_id, name, url, event_types, secret)
VALUES (:id, :tenant, :name, :url, :event_types, :secret) RETURNING {COLUMNS}
""")  # noqa: S608 (a constant of ours)
LIST = text(f"""
SELECT {COLUMNS} FROM webhook_endpoints
WHERE tenant_id = coalesce(:tenant, tenant_id) ORDER BY tenant_id, created_at DESC, id DESC
""")  # noqa: S608 (a constant of ours)
GET = text(f"""
SELECT {COLUMNS} FROM webhook_endpoints
WHERE id = :id AND tenant_id = coalesce(:tenant, tenant_id)
""")  # noqa: S608 (a constant of ours)
# Enabling forgives: what it failed before it was disabled must not disable it again.
CHANGE = text(f"""
UPDATE webhook_endpoints SET
    name = coalesce(:name, name), url = coalesce(:url, url),
    event_types = coalesce(:event_types, event_types), updated_at = now(),
    failing_since = CASE WHEN CAST(:enabled AS boolean) THEN NULL ELSE failing_since END,
    disabled_at = CASE CAST(:enabled AS boolean)
        WHEN true THEN NULL WHEN false THEN coalesce(disabled_at, now()) ELSE disabled_at END,
    disabled_reason = CASE CAST(:enabled AS boolean)
        WHEN true THEN NULL WHEN false THEN coalesce(disabled_reason, :reason)
        ELSE disabled_reason END
WHERE id = :id AND tenant_id = coalesce(:tenant, tenant_id) RETURNING {COLUMNS}
""")  # noqa: S608 (a constant of ours)
ROTATE = text(f"""
UPDATE webhook_endpoints SET secret = :secret, updated_at = now(),
    old_secret = CASE WHEN :grace_s > 0 THEN secret END,
    old_secret_until = CASE WHEN :grace_s > 0 THEN now() + make_interval(secs => :grace_s) END
WHERE id = :id AND tenant_id = coalesce(:tenant, tenant_id)
    AND (:grace_s <= 0 OR old_secret IS NULL OR old_secret_until <= now())
RETURNING {COLUMNS}
""")  # noqa: S608 (a constant of ours)
DELETE = text("""
DELETE FROM webhook_endpoints WHERE id = :id AND tenant_id = coalesce(:tenant, tenant_id)
RETURNING id
""")


class NewEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What an endpoint is made of."""

    url: str
    name: str
    event_types: Sequence[str]
    """Names, or `job.*`, or `*`."""
    tenant: str = DEFAULT_TENANT


class EndpointChange(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes another; None stays."""

    url: str | None = None
    name: str | None = None
    event_types: Sequence[str] | None = None
    enabled: bool | None = None


class WebhookEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint without its secret."""

    id: UUID
    tenant: str
    name: str
    url: str
    event_types: tuple[str, ...]
    secret_hint: str
    created_at: datetime
    updated_at: datetime
    failing_since: datetime | None
    disabled_at: datetime | None
    disabled_reason: str | None


class EndpointSecret(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint with its new secret, which is never to be had again."""

    endpoint: WebhookEndpoint
    secret: str

    def __repr__(self) -> str:
        return f"EndpointSecret({self.endpoint.id})"


def create(connection: Connection, new: NewEndpoint, *, reach: WebhookReach) -> EndpointSecret:
    """Makes an endpoint; a tenant that there is not is made too. Raises Invalid, and Conflict where
    the tenant has MAX_ENDPOINTS."""
    named = event_types(new.event_types)
    _check(new.name, new.url, reach)
    add_tenant(connection, new.tenant)
    connection.execute(LOCK_TENANT, {"tenant": new.tenant})
    if connection.scalar(COUNT, {"tenant": new.tenant}) >= MAX_ENDPOINTS:
        problem = f"the tenant has {MAX_ENDPOINTS} webhook endpoints, which is the limit"
        raise Conflict(f"{problem}; delete one")
    secret = new_secret()
    values = {
        "id": new_id(),
        "tenant": new.tenant,
        "name": new.name,
        "url": new.url,
        "event_types": [str(one) for one in named],
        "secret": secret,
    }
    row = connection.execute(INSERT, values).mappings().one()
    return EndpointSecret(endpoint=_endpoint(row), secret=secret)


def list_endpoints(connection: Connection, *, tenant: str | None) -> list[WebhookEndpoint]:
    """The tenant's endpoints, newest first."""
    return [_endpoint(row) for row in connection.execute(LIST, {"tenant": tenant}).mappings()]


def get_endpoint(
    connection: Connection, endpoint_id: UUID, *, tenant: str | None
) -> WebhookEndpoint:
    """An endpoint. Raises NotFound."""
    row = connection.execute(GET, {"id": endpoint_id, "tenant": tenant}).mappings().first()
    if row is None:
        raise _missing(endpoint_id)
    return _endpoint(row)


def change(
    connection: Connection,
    endpoint_id: UUID,
    wanted: EndpointChange,
    *,
    tenant: str | None,
    reach: WebhookReach,
) -> WebhookEndpoint:
    """Changes an endpoint. What waits for it goes to its new URL. Raises Invalid, NotFound."""
    _check(wanted.name, wanted.url, reach)
    named = None if wanted.event_types is None else event_types(wanted.event_types)
    values = {
        "id": endpoint_id,
        "tenant": tenant,
        "name": wanted.name,
        "url": wanted.url,
        "event_types": None if named is None else [str(one) for one in named],
        "enabled": wanted.enabled,
        "reason": BY_OWNER,
    }
    row = connection.execute(CHANGE, values).mappings().first()
    if row is None:
        raise _missing(endpoint_id)
    return _endpoint(row)


def rotate(
    connection: Connection, endpoint_id: UUID, *, grace_s: float, tenant: str | None
) -> EndpointSecret:
    """Gives an endpoint a new secret. The old one signs too for `grace_s`, 0 for not at all. Raises
    NotFound, and Conflict where an older one still does."""
    secret = new_secret()
    values = {"id": endpoint_id, "tenant": tenant, "secret": secret, "grace_s": float(grace_s)}
    row = connection.execute(ROTATE, values).mappings().first()
    if row is None:
        get_endpoint(connection, endpoint_id, tenant=tenant)
        problem = "two secrets are valid until its last rotation is over"
        raise Conflict(f"{problem}; wait for that, or end the old ones with this rotation")
    return EndpointSecret(endpoint=_endpoint(row), secret=secret)


def delete(connection: Connection, endpoint_id: UUID, *, tenant: str | None) -> None:
    """Deletes an endpoint; what waits for it is never sent. Raises NotFound."""
    if connection.scalar(DELETE, {"id": endpoint_id, "tenant": tenant}) is None:
        raise _missing(endpoint_id)


def endpoint_id_of(name: str, field: str = "webhook_endpoint_id") -> UUID:
    """Reads an id as clients send it. Raises Invalid, naming `field`."""
    return parse_id(name.removeprefix(ENDPOINT), field)


def _missing(endpoint_id: UUID) -> NotFound:
    return NotFound(f"no webhook endpoint has the id {ENDPOINT}{endpoint_id}")


def _check(name: str | None, url: str | None, reach: WebhookReach) -> None:
    if name is not None and not (1 <= len(name) <= MAX_NAME_CHARS and name.isprintable()):
        remedy = f"Write 1 to {MAX_NAME_CHARS} characters, all of them printable"
        raise Invalid("name", f"{name[:32]!r} cannot be one", remedy)
    if url is not None:
        check_url(url, reach)


def _endpoint(row: RowMapping) -> WebhookEndpoint:
    values: dict[str, Any] = dict(row)
    hint = secret_hint(values.pop("secret"))
    named = tuple(values.pop("event_types"))
    return WebhookEndpoint(**values, event_types=named, secret_hint=hint)
