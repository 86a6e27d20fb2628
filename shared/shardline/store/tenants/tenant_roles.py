"""Postgres' roles that belong to a tenant: their connections see and insert its rows alone. The
rules are policies of the migrations. Knows no job.
"""

from __future__ import annotations

import msgspec
from sqlalchemy import Connection, text

from shardline.base.errors import Invalid, NotFound
from shardline.store.tenants.quotas import add_tenant

MAX_LISTED = 1_000

COLUMNS = (
    *("id", "tenant_id", "model", "prompt", "messages", "prompt_ids", "params", "seed"),
    *("priority", "idempotency_key", "metadata", "traceparent", "not_before", "deadline_at"),
    *("depends_on", "on_parent_failure", "retry"),
)
"""Columns of a job that its producer may set."""
GRANTS = (
    f"INSERT ({', '.join(COLUMNS)}), SELECT, UPDATE (cancel_requested_at) ON jobs",
    "SELECT ON results, decisions",
)

ROLE = text("""
SELECT rolsuper OR rolbypassrls OR pg_has_role(rolname, tableowner, 'MEMBER') AS sees_all
FROM pg_roles, pg_tables
WHERE rolname = :role AND tablename = 'jobs' AND schemaname = current_schema()
""")
BIND = text("""
INSERT INTO tenant_roles (role_name, tenant_id) VALUES (:role, :tenant)
ON CONFLICT (role_name) DO UPDATE SET tenant_id = :tenant
""")
UNBIND = text("DELETE FROM tenant_roles WHERE role_name = :role RETURNING tenant_id")
LIST = text(f"""
SELECT role_name AS role, tenant_id AS tenant FROM tenant_roles ORDER BY 2, 1 LIMIT {MAX_LISTED}
""")  # noqa: S608 (a constant of ours)


class TenantRole(msgspec.Struct, frozen=True, kw_only=True):
    """A role of Postgres, and the tenant that it belongs to."""

    role: str
    tenant: str


def grant_role(connection: Connection, tenant: str, role: str) -> None:
    """Gives a role of Postgres to a tenant, with the rights that it needs to submit, cancel and
    read jobs. A tenant that there is not is made. Raises NotFound without such a role, and Invalid
    for one that no policy holds."""
    sees_all = connection.scalar(ROLE, {"role": role})
    if sees_all is None:
        raise NotFound(f"Postgres has no role {role!r}: CREATE ROLE ... LOGIN makes one")
    if sees_all:
        problem = f"{role!r} is a superuser, bypasses row-level security or owns the tables"
        raise Invalid("role", problem, "Name one that has no rights yet")
    add_tenant(connection, tenant)
    connection.execute(BIND, {"role": role, "tenant": tenant})
    quoted = _quoted(connection, role)
    for rights in GRANTS:
        connection.exec_driver_sql(f"GRANT {rights} TO {quoted}")


def revoke_role(connection: Connection, role: str) -> None:
    """Takes the rights that `grant_role` gave away. Rights that somebody else gave stay, and are
    then of no tenant. Raises NotFound."""
    if connection.scalar(UNBIND, {"role": role}) is None:
        raise NotFound(f"the role {role!r} belongs to no tenant")
    quoted = _quoted(connection, role)
    for rights in GRANTS:
        connection.exec_driver_sql(f"REVOKE {rights} FROM {quoted}")


def list_roles(connection: Connection) -> list[TenantRole]:
    """All roles of tenants; at most MAX_LISTED."""
    return [TenantRole(**row) for row in connection.execute(LIST).mappings()]


def _quoted(connection: Connection, role: str) -> str:
    return connection.dialect.identifier_preparer.quote_identifier(role)
