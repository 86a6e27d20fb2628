"""The table of responses; `tables` has the others. Knows no query."""

from __future__ import annotations

from sqlalchemy import CheckConstraint, Column, ForeignKey, Table, Text
from sqlalchemy.dialects.postgresql import JSONB, UUID

from shardline.contract.tables import metadata

# Of a job that came to `/v1/responses`: fields that the answer repeats and the job lacks. Without
# this row the job is no response, or its response was deleted.
responses = Table(
    "responses",
    metadata,
    Column(
        "job_id", UUID(as_uuid=True), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True
    ),
    # Its conversation goes on: the job's messages begin with those of that one, which may be gone.
    Column("previous_response_id", UUID(as_uuid=True)),
    Column("instructions", Text),
    # The request's own items; the job's messages have those before them too.
    Column("input", JSONB, nullable=False),
    Column("options", JSONB, nullable=False),
    CheckConstraint("jsonb_typeof(input) = 'array'", name="input_is_an_array"),
    CheckConstraint("jsonb_typeof(options) = 'object'", name="options_is_an_object"),
)
