"""The bell for relays says what new jobs need: to be sent, to be prepared, or nothing yet. A relay
of the last release looks at them when it polls.

Each step may come again after a migration that was killed.
"""

from __future__ import annotations

from alembic import op

revision = "0036"
down_revision = "0035"
branch_labels = None
depends_on = None

# One that waits for parents has to be looked at, for they may have ended.
RING = """
CREATE OR REPLACE FUNCTION shardline_ring_for_jobs() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('shardline_jobs', word) FROM (
        SELECT DISTINCT CASE WHEN prepared_at IS NULL THEN 'prepare' ELSE 'send' END AS word
        FROM fresh
        WHERE state = 'queued' AND (prepared_at IS NULL OR not_before <= clock_timestamp())
    ) AS words;
    RETURN NULL;
END
$$
"""

TRIGGER = """
CREATE TRIGGER shardline_new_jobs AFTER INSERT ON jobs{fresh}
    FOR EACH STATEMENT EXECUTE FUNCTION {function}()
"""

# As in revision 0029.
CALL_CHILDREN = """
CREATE OR REPLACE FUNCTION shardline_call_children() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    UPDATE parents_of_jobs SET state = 'due' WHERE parent_id = OLD.id AND state = 'open';
    IF FOUND THEN
        PERFORM pg_notify('shardline_jobs', '{word}');
    END IF;
    RETURN NULL;
END
$$
"""
AS_OWNER = """
DO $$ BEGIN
    EXECUTE format('ALTER FUNCTION shardline_call_children()'
        ' SECURITY DEFINER SET search_path = %I, pg_temp', current_schema());
END $$
"""


def upgrade() -> None:
    """Bring the schema to this revision."""
    op.execute(RING)
    _replace_trigger("shardline_ring_for_jobs", fresh=" REFERENCING NEW TABLE AS fresh")
    _replace_call("prepare")


def downgrade() -> None:
    """Bring the schema back."""
    _replace_trigger("shardline_new_jobs", fresh="")
    op.execute("DROP FUNCTION IF EXISTS shardline_ring_for_jobs()")
    _replace_call("")


def _replace_trigger(function: str, *, fresh: str) -> None:
    op.execute("DROP TRIGGER IF EXISTS shardline_new_jobs ON jobs")
    op.execute(TRIGGER.format(fresh=fresh, function=function))


def _replace_call(word: str) -> None:
    op.execute(CALL_CHILDREN.format(word=word))
    op.execute(AS_OWNER)
