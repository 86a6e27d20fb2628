"""The tables of files and batches; `tables` has the others. Knows no query."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.dialects.postgresql import JSONB, UUID

from shardline.contract.batches.batch import BatchStatus
from shardline.contract.table_parts import (
    checks,
    created,
    json_object,
    metadata,
    one_of,
    partial_index,
    time_of,
)

MAX_FILENAME_CHARS = 256
MAX_CUSTOM_ID_CHARS = 512
FILE_PARTS = ("output", "error")
"""Of a batch, which are its lines in OpenAI's form: those that succeeded, and the others."""

batches = Table(
    "batches",
    metadata,
    Column("id", UUID(as_uuid=True), primary_key=True),
    Column("tenant_id", Text, ForeignKey("tenants.id"), nullable=False),
    # The name of the API key that made it: its lines' jobs have it too.
    Column("key_name", Text),
    Column("idempotency_key", Text),
    Column("endpoint", Text, nullable=False),
    # It may be deleted once all of its lines are rows.
    Column("input_file_id", UUID(as_uuid=True), nullable=False),
    Column("completion_window", Text, nullable=False),
    Column("output_expires_after_s", Integer),
    json_object("metadata"),
    # Of its lines, where all ask the same one.
    Column("model", Text),
    Column("errors", JSONB(none_as_null=True)),
    Column("output_file_id", UUID(as_uuid=True)),
    Column("error_file_id", UUID(as_uuid=True)),
    Column("status", Text, nullable=False),
    created("created_at"),
    time_of("expires_at", nullable=False),
    time_of("in_progress_at"),
    time_of("finalizing_at"),
    time_of("completed_at"),
    time_of("failed_at"),
    time_of("expired_at"),
    time_of("cancelling_at"),
    time_of("cancelled_at"),
    # How far its file has become rows: the next line's number, from 1, and first byte.
    Column("num_lines", Integer, nullable=False),
    Column("last_line", Integer, nullable=False),
    Column("next_line", Integer, nullable=False),
    Column("next_byte", BigInteger, nullable=False),
    # All lines before this one have ended and are counted in `settled`; `counts` has all that had
    # ended when a gateway looked last.
    Column("first_open", Integer, nullable=False),
    json_object("settled"),
    json_object("counts"),
    # When a gateway goes on with it: put off while one does, None once it has ended. Each turn has
    # a new fence.
    time_of("due_at"),
    Column("fence", BigInteger, nullable=False),
    UniqueConstraint("tenant_id", "idempotency_key"),
    *checks(
        status_is_known=one_of("status", tuple(BatchStatus)),
        idempotency_key_is_1_to_256_characters="length(idempotency_key) BETWEEN 1 AND 256",
        metadata_is_an_object="jsonb_typeof(metadata) = 'object'",
    ),
)
Index("batches_listing", batches.c.tenant_id, batches.c.created_at, batches.c.id)
partial_index("batches_due", batches.c.due_at, where="due_at IS NOT NULL")

batch_lines = Table(
    "batch_lines",
    metadata,
    Column(
        "batch_id",
        UUID(as_uuid=True),
        ForeignKey("batches.id", ondelete="CASCADE"),
        primary_key=True,
    ),
    Column("line", Integer, primary_key=True, autoincrement=False),
    Column("custom_id", Text),
    # The first one of its choices or questions; None: it has an error.
    Column("job_id", UUID(as_uuid=True)),
    Column("num_jobs", SmallInteger, nullable=False),
    # Of each of its prompts.
    Column("num_choices", SmallInteger, nullable=False),
    # Fields that its answer repeats and its jobs lack.
    json_object("options"),
    Column("error", JSONB(none_as_null=True)),
    UniqueConstraint("batch_id", "custom_id"),
    *checks(a_line_has_a_job_or_an_error="(job_id IS NULL) = (error IS NOT NULL)"),
)
partial_index("batch_lines_jobs", batch_lines.c.job_id, where="job_id IS NOT NULL")

files = Table(
    "files",
    metadata,
    Column("id", UUID(as_uuid=True), primary_key=True),
    Column("tenant_id", Text, ForeignKey("tenants.id"), nullable=False),
    Column("filename", Text, nullable=False),
    Column("purpose", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    created("created_at"),
    time_of("expires_at"),
    # None: its upload has not ended, and it is not visible.
    time_of("uploaded_at"),
    # Of a file without chunks: its content is written as it is read.
    Column("batch_id", UUID(as_uuid=True), ForeignKey("batches.id", ondelete="CASCADE")),
    Column("part", Text),
    *checks(
        filename_is_1_to_256_characters=f"length(filename) BETWEEN 1 AND {MAX_FILENAME_CHARS}",
        part_is_known=one_of("part", FILE_PARTS),
        a_part_is_of_a_batch="(batch_id IS NULL) = (part IS NULL)",
    ),
)
Index("files_listing", files.c.tenant_id, files.c.created_at, files.c.id)
partial_index("files_batches", files.c.batch_id, where="batch_id IS NOT NULL")
partial_index("files_expiring", files.c.expires_at, where="expires_at IS NOT NULL")
partial_index("files_unfinished", files.c.created_at, where="uploaded_at IS NULL")

file_chunks = Table(
    "file_chunks",
    metadata,
    Column(
        "file_id", UUID(as_uuid=True), ForeignKey("files.id", ondelete="CASCADE"), primary_key=True
    ),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("content", LargeBinary, nullable=False),
)
