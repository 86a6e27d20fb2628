"""The tables: one truth for queries and for Alembic. Owns columns, constraints and indexes; knows
no query.

The states and who writes them: docs/job-lifecycle.md. Triggers, functions, storage settings
and the views `job_costs`, `decisions` and `usage` are in the migrations.
"""

from __future__ import annotations

from sqlalchemy import (
    REAL,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    false,
    text,
    true,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB, UUID

from shardline.contract.api_key import Scope
from shardline.contract.fleet.fleet_tables import pipelines, plans, workers
from shardline.contract.job import (
    DEFAULT_PRIORITY,
    DEFAULT_TENANT,
    PRIORITIES,
    FinishReason,
    JobState,
)
from shardline.contract.parents.parent_job import MAX_PARENTS, ON_PARENT_FAILURE
from shardline.contract.parents.parent_table import parents_of_jobs
from shardline.contract.table_parts import (
    checks,
    created,
    json_object,
    metadata,
    one_of,
    partial_index,
    time_of,
)
from shardline.contract.tenants.tenant_tables import tenants

# Of other modules, and found here with the tables of jobs.
__all__ = ["metadata", "parents_of_jobs", "pipelines", "plans", "tenants", "workers"]

JOBS_CHANNEL = "shardline_jobs"
"""NOTIFY: rows for relays to SEND or to PREPARE, by the payload; empty, either."""
SEND = "send"
PREPARE = "prepare"
LEASES_CHANNEL = "shardline_leases"
"""NOTIFY, empty payload: leases were ended before their time, for relays to sweep."""
DONE_CHANNEL = "shardline_done"
"""NOTIFY, for anybody: jobs ended; the payload is their ids, joined by commas, at most 200. A
transaction that ends more rings more often."""
TASKS_CHANNEL = "shardline_tasks"
"""NOTIFY: jobs ended. Empty payload: their Celery tasks are to be settled; WEBHOOKS: their webhooks
are to be sent."""
WEBHOOKS = "webhooks"

MAX_PROMPT_BYTES = 16 << 20
MAX_NAME_CHARS = 64
"""Of a tenant and of an API key."""

ACTIVE = tuple(state for state in JobState if not state.terminal)
TERMINAL = tuple(state for state in JobState if state.terminal)

RANDOM_SEED = "(floor((random() * ('9007199254740992'::bigint)::double precision)))::bigint"
"""Spelled as Postgres spells it back, so that `alembic check` can compare."""
DEAD = "state = 'failed' AND (error ->> 'code') = 'crashed'"
"""A dead letter: its crashes are used up."""
IS_READY = "depends_on IS NULL OR released_at IS NOT NULL"
"""No parent keeps it waiting."""
WAITS = "state = 'queued' AND depends_on IS NOT NULL AND released_at IS NULL"
"""For its parents."""
OUTCOMES = ("succeeded", "failed", "cancelled", "expired", "released", "lost", "crashed")
"""How an attempt ended: as its job did, given back, or its lease expired with and without a token
of the attempt."""
RATE_KINDS = ("price", "carbon")
"""Of energy: money, and grams of CO2 equivalent, for each kWh."""

api_keys = Table(
    "api_keys",
    metadata,
    # Public, part of the key: what a key is called in lists and logs.
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("tenant_id", Text, ForeignKey("tenants.id"), nullable=False),
    Column("digest", LargeBinary, nullable=False),
    Column("scopes", ARRAY(Text), nullable=False),
    created("created_at"),
    time_of("expires_at"),
    time_of("replaced_at"),
    time_of("revoked_at"),
    time_of("last_used_at"),
    *checks(
        name_is_1_to_64_characters=f"length(name) BETWEEN 1 AND {MAX_NAME_CHARS}",
        digest_is_a_sha256="octet_length(digest) = 32",
        scopes_are_known=f"scopes <@ ARRAY[{', '.join(repr(str(scope)) for scope in Scope)}]",
    ),
)

# A rotation leaves the old key valid for a while next to the new one.
_CURRENT_KEY = text("replaced_at IS NULL AND revoked_at IS NULL")
Index("api_keys_names", api_keys.c.name, unique=True, postgresql_where=_CURRENT_KEY)

models = Table(
    "models",
    metadata,
    Column("name", Text, primary_key=True),
    Column("revision", Text),
    Column("context_length", Integer, nullable=False),
    Column("vocab_size", Integer, nullable=False),
    Column("eos_token_ids", ARRAY(Integer), nullable=False, server_default=text("'{}'")),
    Column("tokenizer", Text, nullable=False),
    Column("chat_template", Text),
    json_object("special_tokens"),
    Column("fingerprint", Text, nullable=False),
    # Of heads: fingerprints of LoRA adapters by name, for doors to know them.
    json_object("adapters"),
    # What a model that pools makes of texts; null: it generates text.
    Column("encoder", JSONB(none_as_null=True)),
    created("updated_at"),
    CheckConstraint("length(name) BETWEEN 1 AND 256", name="name_is_1_to_256_characters"),
    CheckConstraint("context_length > 0 AND vocab_size > 0", name="sizes_are_positive"),
)

_TENANT = text(f"COALESCE(shardline_my_tenant(CURRENT_USER), '{DEFAULT_TENANT}'::text)")
jobs = Table(
    "jobs",
    metadata,
    Column("id", UUID(as_uuid=True), primary_key=True, server_default=text("shardline_new_id()")),
    Column("tenant_id", Text, ForeignKey("tenants.id"), nullable=False, server_default=_TENANT),
    Column("model", Text, nullable=False),
    # What to complete: one of the first two, or prompt_ids alone.
    Column("prompt", Text),
    Column("messages", JSONB(none_as_null=True)),
    Column("prompt_ids", ARRAY(Integer)),
    json_object("params"),
    Column("seed", BigInteger, nullable=False, server_default=text(RANDOM_SEED)),
    Column("priority", SmallInteger, nullable=False, server_default=text(str(DEFAULT_PRIORITY))),
    # The name of the API key that it came with; null at doors without keys.
    Column("key_name", Text),
    Column("idempotency_key", Text),
    json_object("metadata"),
    Column("traceparent", Text),
    Column("replay_of", UUID(as_uuid=True), ForeignKey("jobs.id", ondelete="SET NULL")),
    # One of several choices of a request: the id of the first one, and its place. None: it is the
    # only one.
    Column("choice_of", UUID(as_uuid=True)),
    Column("choice_index", SmallInteger),
    # What a stored chat completion shows and its row lacks; None: OpenAI's lists do not have it.
    Column("stored", JSONB(none_as_null=True)),
    # The jobs that it waits for, and what becomes of it if one of them does not succeed.
    Column("depends_on", JSONB(none_as_null=True)),
    Column(
        "on_parent_failure", Text, nullable=False, server_default=text(f"'{ON_PARENT_FAILURE[0]}'")
    ),
    # By relays, when it needs to wait for none of them any more.
    time_of("released_at"),
    # When it may run.
    created("created_at"),
    time_of("not_before", nullable=False, server_default=text("now()")),
    time_of("deadline_at"),
    time_of("cancel_requested_at"),
    # Preparation and sending, by relays.
    time_of("preparing_until"),
    time_of("prepared_at"),
    Column("max_tokens", Integer),
    time_of("sent_at"),
    # By relays: the pause that it waits for, `tenant acme`. It outlives its pause for a moment.
    Column("paused_by", Text),
    Column("num_sends", Integer, nullable=False, server_default=text("0")),
    # Running.
    Column("state", Text, nullable=False, server_default=text(f"'{JobState.QUEUED}'")),
    Column("fence", BigInteger, nullable=False, server_default=text("0")),
    time_of("lease_until"),
    Column("worker", Text),
    Column("pipeline", Text),
    time_of("requeued_at"),
    Column("crashes", Integer, nullable=False, server_default=text("0")),
    Column("max_crashes", Integer, nullable=False, server_default=text("3")),
    # By producers, in place of max_crashes: how often failed attempts are tried again, and when.
    Column("retry", JSONB(none_as_null=True)),
    Column("exactness", Text),
    Column("exact", Boolean, nullable=False, server_default=true()),
    # The end.
    Column("error", JSONB(none_as_null=True)),
    time_of("finished_at"),
    UniqueConstraint("tenant_id", "idempotency_key"),
    *checks(
        state_is_known=one_of("state", tuple(JobState)),
        needs_a_prompt_or_messages_or_prompt_ids=(
            "state = 'failed' OR (num_nonnulls(prompt, messages) <= 1 "
            "AND num_nonnulls(prompt, messages, prompt_ids) >= 1)"
        ),
        prompt_is_too_long=f"octet_length(prompt) <= {MAX_PROMPT_BYTES}",
        model_is_1_to_256_characters="length(model) BETWEEN 1 AND 256",
        messages_is_an_array="jsonb_typeof(messages) = 'array'",
        params_is_an_object="jsonb_typeof(params) = 'object'",
        metadata_is_an_object="jsonb_typeof(metadata) = 'object'",
        # Lists, waits and costs reckon with it, and Python has no other years.
        created_at_is_between_1970_and_9999=(
            "created_at >= '1970-01-01 00:00:00+00' AND created_at < '9999-12-31 00:00:00+00'"
        ),
        seed_is_not_negative="seed >= 0",
        priority_is_0_to_9=f"priority BETWEEN {PRIORITIES[0]} AND {PRIORITIES[-1]}",
        key_name_is_1_to_64_characters=f"length(key_name) BETWEEN 1 AND {MAX_NAME_CHARS}",
        idempotency_key_is_1_to_256_characters="length(idempotency_key) BETWEEN 1 AND 256",
        traceparent_is_at_most_256_characters="length(traceparent) <= 256",
        choice_of_has_an_index="num_nonnulls(choice_of, choice_index) <> 1",
        choice_index_is_not_negative="choice_index >= 0",
        stored_is_an_object="jsonb_typeof(stored) = 'object'",
        depends_on_is_an_array_of_1_to_64=(
            "CASE WHEN jsonb_typeof(depends_on) = 'array' "
            f"THEN jsonb_array_length(depends_on) BETWEEN 1 AND {MAX_PARENTS} "
            "ELSE depends_on IS NULL END"
        ),
        on_parent_failure_is_known=one_of("on_parent_failure", ON_PARENT_FAILURE),
        parents_end_before_it_is_prepared=f"prepared_at IS NULL OR {IS_READY}",
        max_crashes_is_0_to_100="max_crashes BETWEEN 0 AND 100",
        retry_is_an_object="jsonb_typeof(retry) = 'object'",
        counters_are_not_negative="crashes >= 0 AND fence >= 0 AND num_sends >= 0",
        a_lease_belongs_to_running="(state = 'running') = (lease_until IS NOT NULL)",
        finished_at_belongs_to_an_end=(
            f"({one_of('state', TERMINAL)}) = (finished_at IS NOT NULL)"
        ),
        prepared_means_tokenized=(
            "prepared_at IS NULL "
            "OR (prompt_ids IS NOT NULL AND max_tokens >= 1 AND cardinality(prompt_ids) >= 1)"
        ),
        running_means_claimed="state <> 'running' OR (fence > 0 AND prepared_at IS NOT NULL)",
    ),
)

_WAITING = "state = 'queued' AND sent_at IS NULL AND prepared_at IS NOT NULL AND paused_by IS NULL"
_TO_PREPARE = f"state = 'queued' AND prepared_at IS NULL AND ({IS_READY})"
partial_index("jobs_to_prepare", jobs.c.created_at, where=_TO_PREPARE)
partial_index("jobs_waiting", jobs.c.model, where=WAITS)
# not_before last: delayed jobs are passed over inside the index.
_TO_SEND = ("model", "priority", "tenant_id", "created_at", "id", "not_before")
partial_index("jobs_to_send", *(jobs.c[name] for name in _TO_SEND), where=_WAITING)
partial_index("jobs_paused", jobs.c.paused_by, where="state = 'queued' AND paused_by IS NOT NULL")
_SENT = "state = 'queued' AND sent_at IS NOT NULL"
partial_index("jobs_sent", jobs.c.model, jobs.c.priority, where=_SENT)
# Without lease_until: a heartbeat must not touch an index.
partial_index("jobs_active", jobs.c.state, jobs.c.model, where=one_of("state", ACTIVE))
partial_index(
    "jobs_deadlines", jobs.c.deadline_at, where="state = 'queued' AND deadline_at IS NOT NULL"
)
partial_index(
    "jobs_cancels", jobs.c.id, where="state = 'queued' AND cancel_requested_at IS NOT NULL"
)
# Lists, newest first: each filter has its own order.
Index("jobs_listing", jobs.c.created_at, jobs.c.id)
Index("jobs_by_state", jobs.c.tenant_id, jobs.c.state, jobs.c.created_at, jobs.c.id)
Index("jobs_by_model", jobs.c.tenant_id, jobs.c.model, jobs.c.state, jobs.c.created_at, jobs.c.id)
partial_index("jobs_dead", jobs.c.finished_at, jobs.c.id, where=DEAD)
partial_index("jobs_dead_by_model", jobs.c.model, jobs.c.finished_at, jobs.c.id, where=DEAD)
# Without it, deleting old jobs would read the whole table once for each of them.
partial_index("jobs_replays", jobs.c.replay_of, where="replay_of IS NOT NULL")
_CHOICE = (jobs.c.choice_of, jobs.c.choice_index)
Index("jobs_choices", *_CHOICE, unique=True, postgresql_where=text("choice_of IS NOT NULL"))
_STORED = "stored IS NOT NULL"
partial_index("jobs_stored", jobs.c.tenant_id, jobs.c.created_at, jobs.c.id, where=_STORED)
_BY_MODEL = ("tenant_id", "model", "created_at", "id")
partial_index("jobs_stored_by_model", *(jobs.c[name] for name in _BY_MODEL), where=_STORED)
Index(
    "jobs_stored_metadata",
    jobs.c.metadata,
    postgresql_using="gin",
    postgresql_ops={"metadata": "jsonb_path_ops"},
    postgresql_where=text(_STORED),
)

attempts = Table(
    "attempts",
    metadata,
    Column(
        "job_id", UUID(as_uuid=True), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True
    ),
    Column("fence", BigInteger, primary_key=True, autoincrement=False),
    Column("pipeline", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("worker", Text, nullable=False),
    Column("fingerprint", Text, nullable=False),
    Column("exactness", Text, nullable=False),
    created("started_at"),
    created("heartbeat_at"),
    time_of("ended_at"),
    Column("outcome", Text),
    Column("num_resumed", Integer, nullable=False, server_default=text("0")),
    Column("tokens", ARRAY(Integer), nullable=False, server_default=text("'{}'")),
    Column("logprobs", JSONB(none_as_null=True)),
    # It waits in its head for KV: nothing of it is computed, so it cannot have broken anything.
    Column("parked", Boolean, nullable=False, server_default=false()),
    # Of attempts before `pipeline_energy`: joules, and how the power of their stages was known.
    Column("energy_j", Double),
    Column("energy_source", Text),
    CheckConstraint(one_of("outcome", OUTCOMES), name="outcome_is_known"),
)

results = Table(
    "results",
    metadata,
    Column(
        "job_id", UUID(as_uuid=True), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True
    ),
    Column("fence", BigInteger, nullable=False),
    Column("text", Text, nullable=False),
    Column("token_ids", ARRAY(Integer), nullable=False),
    Column("prompt_tokens", Integer, nullable=False),
    Column("completion_tokens", Integer, nullable=False),
    Column("cached_tokens", Integer),
    Column("finish_reason", Text, nullable=False),
    Column("logprobs", JSONB(none_as_null=True)),
    # Of chats, as their heads read them in the text: what the model thought, how many tokens that
    # took, and its calls in OpenAI's form.
    Column("reasoning", Text),
    Column("reasoning_tokens", Integer),
    Column("tool_calls", JSONB(none_as_null=True)),
    # Of the prompt's tokens, null for the first: [token_id, logprob, rank, [[token_id, logprob]]].
    Column("prompt_logprobs", JSONB(none_as_null=True)),
    Column("exact", Boolean, nullable=False),
    json_object("timings"),
    json_object("provenance"),
    created("created_at"),
    Column("choice", Text),
    Column("probabilities", ARRAY(Double)),
    # By encoders, in float32: a text's vector. `score` is also that of a pair of texts.
    Column("embedding", ARRAY(REAL)),
    *(Column(name, Double) for name in ("probability", "confidence", "score", "label_mass")),
    CheckConstraint(one_of("finish_reason", tuple(FinishReason)), name="finish_reason_is_known"),
)

# Tasks of the Celery door by their senders' ids. Several may have one job: repeats under others.
celery_tasks = Table(
    "celery_tasks",
    metadata,
    Column("task_id", Text, primary_key=True),
    # None: a revoke that came before its request, or a request that no row of `jobs` can hold.
    Column("job_id", UUID(as_uuid=True), ForeignKey("jobs.id", ondelete="CASCADE")),
    # JSON, as kombu writes it, until settled: what Celery embeds (link, chain, chord, group).
    Column("request", Text),
    # Why a request has no job.
    Column("error", JSONB(none_as_null=True)),
    created("created_at"),
    # Celery's `expires`: a job not begun by then does not begin. None once relays have seen to it.
    time_of("expires_at"),
    time_of("revoked_at"),
    # When relays settle it: set by a trigger as the job ends, put off while one does it, then None.
    time_of("due_at"),
    Column("num_failures", Integer, nullable=False, server_default=text("0")),
    time_of("settled_at"),
    CheckConstraint("length(task_id) BETWEEN 1 AND 256", name="task_id_is_1_to_256_characters"),
)

Index("celery_tasks_jobs", celery_tasks.c.job_id)
partial_index("celery_tasks_due", celery_tasks.c.due_at, where="due_at IS NOT NULL")
partial_index("celery_tasks_expiring", celery_tasks.c.expires_at, where="expires_at IS NOT NULL")
partial_index("celery_tasks_without_job", celery_tasks.c.created_at, where="job_id IS NULL")

# What energy costs, in money and in carbon, until the next rate of its kind. Relays write those of
# SHARDLINE_ENERGY_PRICE and SHARDLINE_ENERGY_CARBON; anybody may write others.
energy_rates = Table(
    "energy_rates",
    metadata,
    Column("kind", Text, primary_key=True),
    time_of("begins_at", primary_key=True),
    # Money of any one currency for a kWh, or grams of CO2 equivalent.
    Column("per_kwh", Double, nullable=False),
    CheckConstraint(one_of("kind", RATE_KINDS), name="kind_is_known"),
)

# What the devices of a pipeline have drawn in an epoch while they computed, and for how many token
# rows, as its head writes it. The view `job_costs` gives each attempt the mean for its rows.
pipeline_energy = Table(
    "pipeline_energy",
    metadata,
    Column("pipeline", Text, primary_key=True),
    Column("epoch", BigInteger, primary_key=True, autoincrement=False),
    # How the power of its stages is known: rapl, nvml, setting, table; several with +.
    Column("source", Text, nullable=False),
    Column("energy_j", Double, nullable=False),
    Column("num_rows", BigInteger, nullable=False),
    created("updated_at"),
    CheckConstraint("num_rows > 0", name="rows_were_computed"),
)

# What relays have announced before they do it, and when: a restart must not begin the time again.
notices = Table("notices", metadata, Column("name", Text, primary_key=True), created("made_at"))
