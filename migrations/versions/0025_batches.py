"""Files in chunks, and batches with their lines."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB, UUID

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None

STATUSES = (
    "'validating', 'failed', 'in_progress', 'finalizing', 'completed', 'expired', 'cancelling', "
    "'cancelled'"
)


def upgrade() -> None:
    """Bring the schema to this revision."""
    _create_batches()
    _create_lines()
    _create_files()


def downgrade() -> None:
    """Bring the schema back to the revision before."""
    for table in ("file_chunks", "files", "batch_lines", "batches"):
        op.drop_table(table)


def _create_batches() -> None:
    op.create_table(
        "batches",
        _id("id", primary_key=True),
        sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), nullable=False),
        sa.Column("idempotency_key", sa.Text),
        sa.Column("endpoint", sa.Text, nullable=False),
        _id("input_file_id", nullable=False),
        sa.Column("completion_window", sa.Text, nullable=False),
        sa.Column("output_expires_after_s", sa.Integer),
        _object("metadata"),
        sa.Column("model", sa.Text),
        sa.Column("errors", JSONB),
        _id("output_file_id"),
        _id("error_file_id"),
        sa.Column("status", sa.Text, nullable=False),
        _time("created_at", nullable=False, server_default=sa.text("now()")),
        _time("expires_at", nullable=False),
        *(_time(f"{name}_at") for name in ("in_progress", "finalizing", "completed", "failed")),
        *(_time(f"{name}_at") for name in ("expired", "cancelling", "cancelled")),
        sa.Column("num_lines", sa.Integer, nullable=False),
        sa.Column("last_line", sa.Integer, nullable=False),
        sa.Column("next_line", sa.Integer, nullable=False),
        sa.Column("next_byte", sa.BigInteger, nullable=False),
        sa.Column("first_open", sa.Integer, nullable=False),
        _object("settled"),
        _object("counts"),
        _time("due_at"),
        sa.Column("fence", sa.BigInteger, nullable=False),
        sa.UniqueConstraint("tenant_id", "idempotency_key"),
        _check("batches_status_is_known", f"status IN ({STATUSES})"),
        _check(
            "batches_idempotency_key_is_1_to_256_characters",
            "length(idempotency_key) BETWEEN 1 AND 256",
        ),
        _check("batches_metadata_is_an_object", "jsonb_typeof(metadata) = 'object'"),
    )
    op.create_index("batches_listing", "batches", ["tenant_id", "created_at", "id"])
    _partial_index("batches_due", "batches", "due_at", "due_at IS NOT NULL")


def _create_lines() -> None:
    op.create_table(
        "batch_lines",
        _id("batch_id", sa.ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("line", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("custom_id", sa.Text),
        _id("job_id"),
        sa.Column("num_jobs", sa.SmallInteger, nullable=False),
        sa.Column("num_choices", sa.SmallInteger, nullable=False),
        _object("options"),
        sa.Column("error", JSONB),
        sa.UniqueConstraint("batch_id", "custom_id"),
        _check(
            "batch_lines_a_line_has_a_job_or_an_error",
            "(job_id IS NULL) = (error IS NOT NULL)",
        ),
    )
    _partial_index("batch_lines_jobs", "batch_lines", "job_id", "job_id IS NOT NULL")


def _create_files() -> None:
    op.create_table(
        "files",
        _id("id", primary_key=True),
        sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), nullable=False),
        sa.Column("filename", sa.Text, nullable=False),
        sa.Column("purpose", sa.Text, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        _time("created_at", nullable=False, server_default=sa.text("now()")),
        _time("expires_at"),
        _time("uploaded_at"),
        _id("batch_id", sa.ForeignKey("batches.id", ondelete="CASCADE")),
        sa.Column("part", sa.Text),
        _check("files_filename_is_1_to_256_characters", "length(filename) BETWEEN 1 AND 256"),
        _check("files_part_is_known", "part IN ('output', 'error')"),
        _check("files_a_part_is_of_a_batch", "(batch_id IS NULL) = (part IS NULL)"),
    )
    op.create_index("files_listing", "files", ["tenant_id", "created_at", "id"])
    _partial_index("files_batches", "files", "batch_id", "batch_id IS NOT NULL")
    _partial_index("files_expiring", "files", "expires_at", "expires_at IS NOT NULL")
    _partial_index("files_unfinished", "files", "created_at", "uploaded_at IS NULL")
    op.create_table(
        "file_chunks",
        _id("file_id", sa.ForeignKey("files.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
    )


def _id(name: str, *rules: Any, **options: Any) -> sa.Column[Any]:
    return sa.Column(name, UUID(as_uuid=True), *rules, **options)


def _time(name: str, **options: Any) -> sa.Column[Any]:
    return sa.Column(name, sa.TIMESTAMP(timezone=True), **options)


def _object(name: str) -> sa.Column[Any]:
    return sa.Column(name, JSONB, nullable=False, server_default=sa.text("'{}'"))


def _check(name: str, rule: str) -> sa.CheckConstraint:
    return sa.CheckConstraint(rule, name=op.f(name))


def _partial_index(name: str, table: str, column: str, where: str) -> None:
    op.create_index(name, table, [column], postgresql_where=sa.text(where))
