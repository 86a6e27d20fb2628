"""The table of administrative acts. Knows no query.

Triggers of the migrations write it, and a function for acts on many jobs.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Identity, Index, Table, Text
from sqlalchemy.dialects.postgresql import JSON

from shardline.contract.table_parts import created, metadata

audit = Table(
    "audit",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    created("at"),
    # Who acts, as reported by the door: an API key's id, or a user of the command line.
    Column("actor", Text, nullable=False),
    # The Postgres role of the connection, independent of the door.
    Column("role_name", Text, nullable=False),
    Column("tenant_id", Text),
    Column("act", Text, nullable=False),
    Column("object_kind", Text, nullable=False),
    Column("object_id", Text, nullable=False),
    # Values by column, of a change each before and after it. Of secrets, URLs and requests only
    # that they changed. JSONB would refuse what a request may hold.
    Column("change", JSON, nullable=False),
)
Index("audit_listing", audit.c.at, audit.c.id)
