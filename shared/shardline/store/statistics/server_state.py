"""The state of a Postgres server as an installation needs it: version, load, schema, rights, and
work without a process that does it. Reads only."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, inspect, text

from shardline.contract.tables import IS_READY, metadata

FACTS = text("""
SELECT current_setting('server_version') AS version,
    current_setting('server_version_num')::int AS version_num, pg_is_in_recovery() AS is_standby,
    current_setting('transaction_read_only')::bool AS is_read_only,
    current_setting('max_connections')::int AS max_connections,
    (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend')
        AS num_connections,
    extract(epoch FROM clock_timestamp())::float8 AS now_s
""")

RIGHTS = text("""
SELECT name, right_name FROM (VALUES ('jobs', 'SELECT'), ('jobs', 'INSERT'), ('jobs', 'UPDATE'),
    ('results', 'SELECT')) AS wanted (name, right_name)
WHERE NOT has_table_privilege(name, right_name)
""")

# By the indexes of what is to be prepared and of what is to be sent.
UNSENT = text(f"""
SELECT model FROM (
    (SELECT model FROM jobs WHERE state = 'queued' AND prepared_at IS NULL AND ({IS_READY})
        AND greatest(created_at, released_at) < now() - make_interval(secs => :late_s) LIMIT 1)
    UNION ALL
    SELECT name FROM models WHERE EXISTS (
        SELECT FROM jobs WHERE state = 'queued' AND sent_at IS NULL AND prepared_at IS NOT NULL
            AND paused_by IS NULL AND jobs.model = models.name AND cancel_requested_at IS NULL
            AND greatest(not_before, created_at) < now() - make_interval(secs => :late_s))
        AND NOT EXISTS (
            SELECT FROM jobs WHERE state = 'queued' AND sent_at IS NOT NULL
                AND jobs.model = models.name)
) AS late
""")  # noqa: S608 (a constant of ours)

DEAD = text("""
SELECT count(*) FROM (
    SELECT FROM jobs WHERE state = 'failed' AND (error ->> 'code') = 'crashed'
        AND finished_at > now() - interval '1 day' LIMIT 1000
) AS dead
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """Figures that a server reports of itself."""

    version: str
    version_num: int
    is_standby: bool
    is_read_only: bool
    """Transactions of this role in this database take no writes."""
    max_connections: int
    num_connections: int
    now_s: float
    """Its clock, seconds since the epoch."""


def server_facts(connection: Connection) -> ServerFacts:
    """Asks the server."""
    return ServerFacts(**connection.execute(FACTS).mappings().one())


def missing_parts(connection: Connection) -> list[str]:
    """Returns the tables that the database lacks, and the columns of those that it has."""
    inspector = inspect(connection)
    there = set(inspector.get_table_names())
    missing = []
    for table in metadata.sorted_tables:
        if table.name not in there:
            missing.append(table.name)
            continue
        columns = {column["name"] for column in inspector.get_columns(table.name)}
        missing += [
            f"{table.name}.{each.name}" for each in table.columns if each.name not in columns
        ]
    return missing


def missing_rights(connection: Connection) -> list[str]:
    """Returns what a producer's role needs and this one lacks, as `INSERT on jobs`."""
    return [f"{row.right_name} on {row.name}" for row in connection.execute(RIGHTS)]


def unsent_models(connection: Connection, *, late_s: float) -> list[str]:
    """Returns the models that have a due job which no relay has prepared or sent for so long, and
    no sent one before it."""
    return sorted({row.model for row in connection.execute(UNSENT, {"late_s": late_s})})


def num_crashed_lately(connection: Connection) -> int:
    """Counts the dead letters of the last day, 1,000 at most."""
    return int(connection.execute(DEAD).scalar_one())
