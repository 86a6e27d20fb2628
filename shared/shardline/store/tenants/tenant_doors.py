"""Users of the broker that belong to a tenant: relays take its requests from its own keys while it
has one. Knows no Redis.
"""

from __future__ import annotations

import re

import msgspec
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from shardline.base.errors import Conflict, Invalid, NotFound
from shardline.contract.tenants.tenant_door import TenantDoor
from shardline.store.tenants.quotas import add_tenant

MAX_LISTED = 1_000
LOCKED = "55P03"
"""SQLSTATE lock_not_available."""
USERS = re.compile(r"[A-Za-z0-9_.@-]{1,64}")

BIND = text("""
INSERT INTO tenant_doors (user_name, tenant_id) VALUES (:user, :tenant) ON CONFLICT DO NOTHING
""")
TENANT = text("SELECT tenant_id FROM tenant_doors WHERE user_name = :user")
UNBIND = text("DELETE FROM tenant_doors WHERE user_name = :user RETURNING tenant_id")
LIST = text(f"""
SELECT user_name AS user, tenant_id AS tenant FROM tenant_doors ORDER BY 2, 1 LIMIT {MAX_LISTED}
""")  # noqa: S608 (a constant of ours)
TENANTS = text("SELECT DISTINCT tenant_id FROM tenant_doors ORDER BY 1")
WAIT_BRIEFLY = text("SELECT set_config('lock_timeout', :wait_ms, true)")
WAIT_MS = 1_000
"""Of each request, that is all that a tenant can hold up the others with."""


class BrokerUser(msgspec.Struct, frozen=True, kw_only=True):
    """A user of the broker, and the tenant that it belongs to."""

    user: str
    tenant: str


def grant_user(connection: Connection, tenant: str, user: str) -> bool:
    """Gives a user of the broker to a tenant; a tenant that there is not is made. Returns whether
    it had none before. Raises Invalid, and Conflict for another tenant's."""
    if not USERS.fullmatch(user) or user == "default":
        raise Invalid("user", f"{user[:32]!r} cannot be one", "Write up to 64 letters and digits")
    TenantDoor.of(tenant)
    add_tenant(connection, tenant)
    if connection.execute(BIND, {"user": user, "tenant": tenant}).rowcount:
        return True
    owner = connection.scalar(TENANT, {"user": user})
    if owner != tenant:
        raise Conflict(f"the user {user} belongs to the tenant {owner}; revoke it first")
    return False


def revoke_user(connection: Connection, user: str) -> None:
    """Takes a user of the broker away from its tenant. Raises NotFound."""
    if connection.scalar(UNBIND, {"user": user}) is None:
        raise NotFound(f"the user {user!r} belongs to no tenant")


def list_users(connection: Connection) -> list[BrokerUser]:
    """All users of tenants; at most MAX_LISTED."""
    return [BrokerUser(**row) for row in connection.execute(LIST).mappings()]


def wait_briefly(connection: Connection, *, wait_ms: int = WAIT_MS) -> None:
    """Makes this transaction give up soon where another holds a lock: a tenant with a role of
    Postgres may hold those that its own requests need."""
    connection.execute(WAIT_BRIEFLY, {"wait_ms": str(wait_ms)})


def is_locked_out(error: BaseException) -> bool:
    """Whether another transaction held a lock for too long."""
    return isinstance(error, DBAPIError) and getattr(error.orig, "sqlstate", None) == LOCKED


def all_doors(connection: Connection) -> list[TenantDoor]:
    """The doors of all tenants with a user."""
    return [TenantDoor(tenant) for tenant in connection.scalars(TENANTS)]
