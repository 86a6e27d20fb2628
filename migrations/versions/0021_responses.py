"""Responses: what OpenAI's form of an answer repeats of its request, beside its job."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB, UUID

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema to this revision."""
    op.create_table(
        "responses",
        sa.Column(
            "job_id",
            UUID(as_uuid=True),
            sa.ForeignKey("jobs.id", ondelete="CASCADE"),
            primary_key=True,
        ),
        sa.Column("previous_response_id", UUID(as_uuid=True)),
        sa.Column("instructions", sa.Text),
        sa.Column("input", JSONB, nullable=False),
        sa.Column("options", JSONB, nullable=False),
        sa.CheckConstraint(
            "jsonb_typeof(input) = 'array'", name=op.f("responses_input_is_an_array")
        ),
        sa.CheckConstraint(
            "jsonb_typeof(options) = 'object'", name=op.f("responses_options_is_an_object")
        ),
    )


def downgrade() -> None:
    """Bring the schema back to the revision before."""
    op.drop_table("responses")
