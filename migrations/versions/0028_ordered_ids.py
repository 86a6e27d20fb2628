"""Jobs that SQL inserts without an id get one that sorts by the moment: rows of one statement run
in their order, so that those with a common beginning find it in the prefix cache."""

from __future__ import annotations

from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None

# A UUIDv7 as `shardline.contract.ids.new_id` makes it: 48 bits of milliseconds, 12 of their
# fraction, 62 random ones.
NEW_ID = """
CREATE OR REPLACE FUNCTION shardline_new_id() RETURNS uuid LANGUAGE sql VOLATILE PARALLEL SAFE AS $$
SELECT encode(
    substring(int8send(microseconds / 1000) FROM 3)
    || int2send((28672 + microseconds % 1000 * 4096 / 1000)::smallint)
    || substring(uuid_send(gen_random_uuid()) FROM 9), 'hex')::uuid
FROM (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS microseconds) AS clock
$$
"""


def upgrade() -> None:
    """Bring the schema to this revision."""
    op.execute(NEW_ID)
    op.execute("ALTER TABLE jobs ALTER COLUMN id SET DEFAULT shardline_new_id()")


def downgrade() -> None:
    """Bring the schema back to the revision before."""
    op.execute("ALTER TABLE jobs ALTER COLUMN id SET DEFAULT gen_random_uuid()")
    op.execute("DROP FUNCTION IF EXISTS shardline_new_id()")
