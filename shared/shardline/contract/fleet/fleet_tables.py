"""The tables of pipelines and fleets: who serves, with which layers, and who may. Knows no job."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Double, Integer, Table, Text, false, text
from sqlalchemy.dialects.postgresql import JSONB

from shardline.contract.table_parts import created, metadata, time_of

pipelines = Table(
    "pipelines",
    metadata,
    Column("id", Text, primary_key=True),
    Column("model", Text, nullable=False),
    Column("fingerprint", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False, server_default=text("1")),
    Column("head", Text, nullable=False),
    time_of("lease_until", nullable=False),
    time_of("ready_at"),
    Column("seats", Integer, nullable=False, server_default=text("0")),
    # The longest sequence that the KV of all its stages holds; null until it was ready once.
    Column("kv_tokens", BigInteger),
    Column("stages", JSONB, nullable=False, server_default=text("'[]'")),
    Column("exact", Boolean, nullable=False, server_default=false()),
)

# Stages that take their layers from a plan.
workers = Table(
    "workers",
    metadata,
    Column("worker", Text, primary_key=True),
    Column("model", Text, nullable=False),
    # What the model's layers weigh and take here: ModelCosts, DeviceProfile. None until it joined.
    Column("shapes", JSONB),
    Column("profile", JSONB),
    # By name: shapes and profile of other models that it may serve in place of this one.
    Column("further", JSONB, nullable=False, server_default=text("'{}'")),
    # Where it answers others that measure the link to its machine.
    Column("machine", Text),
    Column("address", Text),
    created("joined_at"),
    time_of("lease_until", nullable=False),
)

plans = Table(
    "plans",
    metadata,
    Column("model", Text, primary_key=True),
    Column("version", BigInteger, nullable=False, server_default=text("1")),
    # The layers of each stage, as pairs of first and stop, one pipeline after the other; a pipeline
    # begins at layer 0. And for each worker the place of its stage among them.
    Column("split", JSONB, nullable=False),
    Column("stages", JSONB, nullable=False),
    Column("tokens_per_s", Double),
    created("made_at"),
)
