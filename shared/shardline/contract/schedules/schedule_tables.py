"""The tables of pauses and schedules; `tables` has the others. Knows no query.

The triggers, which wake relays and restart a changed schedule, are in the migrations.
"""

from __future__ import annotations

from enum import StrEnum

from sqlalchemy import Boolean, Column, ForeignKey, Table, Text, UniqueConstraint, false, text
from sqlalchemy.dialects.postgresql import JSON, JSONB, UUID

from shardline.contract.job import DEFAULT_TENANT
from shardline.contract.table_parts import checks, created, metadata, one_of, partial_index, time_of

MAX_TARGET_CHARS = 512
MAX_REASON_CHARS = 1024
MAX_NAME_CHARS = 64
MAX_CRON_CHARS = 256


class PauseKind(StrEnum):
    """What is paused: all jobs of a model, a tenant, a batch, or with a tag."""

    MODEL = "model"
    TENANT = "tenant"
    BATCH = "batch"
    TAG = "tag"


class CatchUp(StrEnum):
    """What becomes of missed times: all of them together one job, or none."""

    ONCE = "once"
    NONE = "none"


pauses = Table(
    "pauses",
    metadata,
    Column("kind", Text, primary_key=True),
    # A name, a batch's UUID, or `key=value` of jobs' metadata.
    Column("target", Text, primary_key=True),
    Column("reason", Text),
    created("created_at"),
    *checks(
        kind_is_known=one_of("kind", tuple(PauseKind)),
        target_is_1_to_512_characters=f"length(target) BETWEEN 1 AND {MAX_TARGET_CHARS}",
        reason_is_at_most_1024_characters=f"length(reason) <= {MAX_REASON_CHARS}",
        a_tag_is_key_and_value="kind <> 'tag' OR strpos(target, '=') > 1",
    ),
)

schedules = Table(
    "schedules",
    metadata,
    Column("id", UUID(as_uuid=True), primary_key=True, server_default=text("gen_random_uuid()")),
    Column(
        "tenant_id",
        Text,
        ForeignKey("tenants.id"),
        nullable=False,
        server_default=text(f"'{DEFAULT_TENANT}'"),
    ),
    Column("name", Text, nullable=False),
    Column("cron", Text, nullable=False),
    Column("time_zone", Text, nullable=False, server_default=text("'UTC'")),
    # A job's, as any door takes it. Not as JSONB, which sorts the properties of a schema.
    Column("request", JSON, nullable=False),
    Column("catch_up", Text, nullable=False, server_default=text(f"'{CatchUp.ONCE}'")),
    Column("paused", Boolean, nullable=False, server_default=false()),
    # The name of the API key that made it: its jobs have it too.
    Column("key_name", Text),
    created("created_at"),
    # It fires at the times behind this one: the last time, or when it was made or changed.
    created("fires_after"),
    # By relays: the first of these. None: it is yet to be found.
    time_of("next_at"),
    time_of("last_at"),
    Column("last_job_id", UUID(as_uuid=True)),
    # Why there is no job of `last_at`, or no next time.
    Column("last_error", JSONB(none_as_null=True)),
    UniqueConstraint("tenant_id", "name"),
    *checks(
        name_is_1_to_64_characters=f"length(name) BETWEEN 1 AND {MAX_NAME_CHARS}",
        cron_is_1_to_256_characters=f"length(cron) BETWEEN 1 AND {MAX_CRON_CHARS}",
        time_zone_is_1_to_64_characters="length(time_zone) BETWEEN 1 AND 64",
        catch_up_is_known=one_of("catch_up", tuple(CatchUp)),
        request_is_an_object="json_typeof(request) = 'object'",
        times_can_be_read=(
            "extract(year FROM fires_after) BETWEEN 2000 AND 2999"
            " AND extract(year FROM next_at) BETWEEN 2000 AND 2999"
        ),
        key_name_is_1_to_64_characters="length(key_name) BETWEEN 1 AND 64",
    ),
)
partial_index("schedules_due", schedules.c.next_at, where="NOT paused")
