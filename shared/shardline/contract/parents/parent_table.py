"""The table of what jobs wait for; `tables` has the others. Knows no query.

Triggers in the migrations insert its rows and make them due.
"""

from __future__ import annotations

from sqlalchemy import Column, ForeignKey, Index, Table, Text, text
from sqlalchemy.dialects.postgresql import UUID

from shardline.contract.table_parts import checks, metadata, one_of, partial_index

# Without a foreign key to the parent: an insert would lock the parent's row, maybe for long.
parents_of_jobs = Table(
    "parents_of_jobs",
    metadata,
    Column(
        "job_id", UUID(as_uuid=True), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True
    ),
    Column("parent_id", UUID(as_uuid=True), primary_key=True),
    # due: a relay has to look at the parent. open: the parent's end will make it due.
    Column("state", Text, nullable=False, server_default=text("'due'")),
    *checks(state_is_known=one_of("state", ("due", "open", "succeeded", "failed"))),
)
Index("parents_of_jobs_parents", parents_of_jobs.c.parent_id)
partial_index("parents_of_jobs_due", parents_of_jobs.c.job_id, where="state = 'due'")
