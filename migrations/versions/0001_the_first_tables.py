"""The first tables, the bell that rings for new jobs, and the default tenant."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

JOB_CHECKS = {
    "a_lease_belongs_to_running": "(state = 'running') = (lease_until IS NOT NULL)",
    "finished_at_belongs_to_an_end": (
        "(state IN ('succeeded', 'failed', 'cancelled', 'expired')) = (finished_at IS NOT NULL)"
    ),
    "messages_is_an_array": "jsonb_typeof(messages) = 'array'",
    "metadata_is_an_object": "jsonb_typeof(metadata) = 'object'",
    "params_is_an_object": "jsonb_typeof(params) = 'object'",
    "running_means_claimed": "state <> 'running' OR (fence > 0 AND prepared_at IS NOT NULL)",
    "needs_a_prompt_or_messages_or_prompt_ids": (
        "state = 'failed' OR (num_nonnulls(prompt, messages) <= 1 "
        "AND num_nonnulls(prompt, messages, prompt_ids) >= 1)"
    ),
    "state_is_known": (
        "state IN ('queued', 'running', 'succeeded', 'failed', 'cancelled', 'expired')"
    ),
    "counters_are_not_negative": "crashes >= 0 AND fence >= 0 AND num_sends >= 0",
    "idempotency_key_is_1_to_256_characters": "length(idempotency_key) BETWEEN 1 AND 256",
    "model_is_1_to_256_characters": "length(model) BETWEEN 1 AND 256",
    "max_crashes_is_0_to_100": "max_crashes BETWEEN 0 AND 100",
    "prompt_is_too_long": "octet_length(prompt) <= 16777216",
    "prepared_means_tokenized": (
        "prepared_at IS NULL "
        "OR (prompt_ids IS NOT NULL AND max_tokens >= 1 AND cardinality(prompt_ids) >= 1)"
    ),
    "traceparent_is_at_most_256_characters": "length(traceparent) <= 256",
    "priority_is_0_to_9": "priority BETWEEN 0 AND 9",
    "seed_is_not_negative": "seed >= 0",
}

NEW_JOBS_BELL = """
CREATE FUNCTION shardline_new_jobs() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('shardline_jobs', '');
    RETURN NULL;
END
$$;
CREATE TRIGGER shardline_new_jobs AFTER INSERT ON jobs
    FOR EACH STATEMENT EXECUTE FUNCTION shardline_new_jobs();
"""

STORAGE = """
ALTER TABLE jobs SET (
    fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.02);
ALTER TABLE attempts SET (fillfactor = 60, autovacuum_vacuum_scale_factor = 0.02);
ALTER TABLE pipelines SET (fillfactor = 50);
"""
"""Rows that are written each second find room in their own page (HOT updates) and are cleaned
soon."""


def upgrade() -> None:
    """Bring the schema to this revision."""
    _create_small_tables()
    _create_jobs()
    _create_job_indexes()
    _create_attempts()
    _create_results()
    op.execute(NEW_JOBS_BELL)
    op.execute(STORAGE)
    op.execute("INSERT INTO tenants (id) VALUES ('default')")


def downgrade() -> None:
    """Bring the schema back to an empty database."""
    for table in ("results", "attempts", "jobs", "tenants", "pipelines", "models"):
        op.drop_table(table)
    op.execute("DROP FUNCTION shardline_new_jobs()")


def _now(name: str) -> sa.Column[Any]:
    return sa.Column(
        name, sa.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False
    )


def _object(name: str) -> sa.Column[Any]:
    return sa.Column(
        name,
        postgresql.JSONB(astext_type=sa.Text()),
        server_default=sa.text("'{}'"),
        nullable=False,
    )


def _create_small_tables() -> None:
    op.create_table(
        "models",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("revision", sa.Text(), nullable=True),
        sa.Column("context_length", sa.Integer(), nullable=False),
        sa.Column("vocab_size", sa.Integer(), nullable=False),
        sa.Column(
            "eos_token_ids",
            postgresql.ARRAY(sa.Integer()),
            server_default=sa.text("'{}'"),
            nullable=False,
        ),
        sa.Column("tokenizer", sa.Text(), nullable=False),
        sa.Column("chat_template", sa.Text(), nullable=True),
        _object("special_tokens"),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        _now("updated_at"),
        sa.CheckConstraint(
            "context_length > 0 AND vocab_size > 0", name=op.f("models_sizes_are_positive")
        ),
        sa.CheckConstraint(
            "length(name) BETWEEN 1 AND 256", name=op.f("models_name_is_1_to_256_characters")
        ),
        sa.PrimaryKeyConstraint("name", name=op.f("models_pkey")),
    )
    op.create_table(
        "pipelines",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), server_default=sa.text("1"), nullable=False),
        sa.Column("head", sa.Text(), nullable=False),
        sa.Column("lease_until", sa.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("ready_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("seats", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column(
            "stages",
            postgresql.JSONB(astext_type=sa.Text()),
            server_default=sa.text("'[]'"),
            nullable=False,
        ),
        sa.Column("exact", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pipelines_pkey")),
    )
    op.create_table(
        "tenants",
        sa.Column("id", sa.Text(), nullable=False),
        _now("created_at"),
        sa.PrimaryKeyConstraint("id", name=op.f("tenants_pkey")),
    )


def _create_jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.UUID(), server_default=sa.text("gen_random_uuid()"), nullable=False),
        sa.Column("tenant_id", sa.Text(), server_default=sa.text("'default'"), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("prompt", sa.Text(), nullable=True),
        sa.Column(
            "messages", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True
        ),
        sa.Column("prompt_ids", postgresql.ARRAY(sa.Integer()), nullable=True),
        _object("params"),
        sa.Column(
            "seed",
            sa.BigInteger(),
            server_default=sa.text(
                "(floor((random() * ('9007199254740992'::bigint)::double precision)))::bigint"
            ),
            nullable=False,
        ),
        sa.Column("priority", sa.SmallInteger(), server_default=sa.text("5"), nullable=False),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        _object("metadata"),
        sa.Column("traceparent", sa.Text(), nullable=True),
        sa.Column("replay_of", sa.UUID(), nullable=True),
        _now("created_at"),
        _now("not_before"),
        sa.Column("deadline_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("cancel_requested_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("prepared_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("max_tokens", sa.Integer(), nullable=True),
        sa.Column("sent_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("num_sends", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("state", sa.Text(), server_default=sa.text("'queued'"), nullable=False),
        sa.Column("fence", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("lease_until", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("worker", sa.Text(), nullable=True),
        sa.Column("pipeline", sa.Text(), nullable=True),
        sa.Column("requeued_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("crashes", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("max_crashes", sa.Integer(), server_default=sa.text("3"), nullable=False),
        sa.Column("exactness", sa.Text(), nullable=True),
        sa.Column("exact", sa.Boolean(), server_default=sa.text("true"), nullable=False),
        sa.Column(
            "error", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True
        ),
        sa.Column("finished_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["replay_of"], ["jobs.id"], name=op.f("jobs_replay_of_fkey"), ondelete="SET NULL"
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("jobs_tenant_id_fkey")),
        sa.PrimaryKeyConstraint("id", name=op.f("jobs_pkey")),
        sa.UniqueConstraint(
            "tenant_id", "idempotency_key", name=op.f("jobs_tenant_id_idempotency_key_key")
        ),
        *(sa.CheckConstraint(rule, name=op.f(f"jobs_{name}")) for name, rule in JOB_CHECKS.items()),
    )


def _create_job_indexes() -> None:
    op.create_index(
        "jobs_cancels",
        "jobs",
        ["id"],
        unique=False,
        postgresql_where=sa.text("state = 'queued' AND cancel_requested_at IS NOT NULL"),
    )
    op.create_index(
        "jobs_deadlines",
        "jobs",
        ["deadline_at"],
        unique=False,
        postgresql_where=sa.text("state = 'queued' AND deadline_at IS NOT NULL"),
    )
    op.create_index("jobs_listing", "jobs", ["created_at", "id"], unique=False)
    op.create_index(
        "jobs_active",
        "jobs",
        ["state", "model"],
        unique=False,
        postgresql_where=sa.text("state IN ('queued', 'running')"),
    )
    op.create_index(
        "jobs_sent",
        "jobs",
        ["model", "priority"],
        unique=False,
        postgresql_where=sa.text("state = 'queued' AND sent_at IS NOT NULL"),
    )
    op.create_index(
        "jobs_to_prepare",
        "jobs",
        ["created_at"],
        unique=False,
        postgresql_where=sa.text("state = 'queued' AND prepared_at IS NULL"),
    )
    op.create_index(
        "jobs_to_send",
        "jobs",
        ["model", "priority", "created_at", "id", "not_before"],
        unique=False,
        postgresql_where=sa.text(
            "state = 'queued' AND sent_at IS NULL AND prepared_at IS NOT NULL"
        ),
    )


def _create_attempts() -> None:
    op.create_table(
        "attempts",
        sa.Column("job_id", sa.UUID(), nullable=False),
        sa.Column("fence", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("pipeline", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("worker", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("exactness", sa.Text(), nullable=False),
        _now("started_at"),
        _now("heartbeat_at"),
        sa.Column("ended_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("num_resumed", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column(
            "tokens", postgresql.ARRAY(sa.Integer()), server_default=sa.text("'{}'"), nullable=False
        ),
        sa.Column(
            "logprobs", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True
        ),
        sa.CheckConstraint(
            "outcome IN ('succeeded', 'failed', 'cancelled', 'expired', "
            "'released', 'lost', 'crashed')",
            name=op.f("attempts_outcome_is_known"),
        ),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name=op.f("attempts_job_id_fkey"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "fence", name=op.f("attempts_pkey")),
    )


def _create_results() -> None:
    op.create_table(
        "results",
        sa.Column("job_id", sa.UUID(), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("token_ids", postgresql.ARRAY(sa.Integer()), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("completion_tokens", sa.Integer(), nullable=False),
        sa.Column("finish_reason", sa.Text(), nullable=False),
        sa.Column(
            "logprobs", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True
        ),
        sa.Column("exact", sa.Boolean(), nullable=False),
        _object("timings"),
        _object("provenance"),
        _now("created_at"),
        sa.CheckConstraint(
            "finish_reason IN ('stop', 'length', 'cancelled', 'expired')",
            name=op.f("results_finish_reason_is_known"),
        ),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name=op.f("results_job_id_fkey"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", name=op.f("results_pkey")),
    )
