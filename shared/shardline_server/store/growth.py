"""What of the tables stays until somebody deletes it: their sizes, and the dead letters. Reads
only."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, text

from shardline.contract.tables import DEAD, attempts, jobs, results

TABLES = (jobs.name, attempts.name, results.name)

MAX_COUNTED = 10_000
"""Dead letters; more are shown as this many."""

SIZES = text("""
SELECT name, pg_total_relation_size(name::regclass) AS num_bytes,
    coalesce(n_dead_tup, 0) AS num_dead_rows
FROM unnest(CAST(:names AS text[])) AS name LEFT JOIN pg_stat_user_tables ON relid = name::regclass
""")

NUM_DEAD = text(f"""
SELECT count(*) FROM (SELECT FROM jobs WHERE {DEAD} LIMIT :most) AS dead
""")  # noqa: S608 (a constant of ours)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Holds the size of one table."""

    num_bytes: int
    """On disk, with indexes, long values and space that Postgres will use again."""
    num_dead_rows: int
    """Old versions of rows, estimated by Postgres. VACUUM takes away what no open transaction can
    see."""


def sizes(connection: Connection) -> dict[str, Size]:
    """Returns the sizes by table."""
    rows = connection.execute(SIZES, {"names": list(TABLES)})
    return {
        row.name: Size(num_bytes=row.num_bytes, num_dead_rows=row.num_dead_rows) for row in rows
    }


def num_dead(connection: Connection) -> int:
    """Dead letters, replayed or not; at most MAX_COUNTED."""
    return int(connection.scalar(NUM_DEAD, {"most": MAX_COUNTED}) or 0)
