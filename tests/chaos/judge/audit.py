"""The judge's own eyes in Postgres: triggers that write down who changed a running job without
holding it, and how jobs of tenants move.

Sessions are told apart by the application name that the services give themselves; leases by
Postgres's clock. Knows tables and those names, none of the product's code. Heads write under
`shardline <worker>`, relays as `shardline-relay`.
"""

from __future__ import annotations

import psycopg
from psycopg.rows import dict_row

from tests.chaos.judge.tenants import rows
from tests.chaos.report.finding import Finding

INSTALL = """
CREATE SCHEMA judge;
CREATE TABLE judge.stale (
    job_id uuid NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp(), what text NOT NULL
);

CREATE TABLE judge.times (lease interval NOT NULL);

CREATE FUNCTION judge.note(job_id uuid, what text) RETURNS void LANGUAGE sql AS $$
    INSERT INTO judge.stale (job_id, what)
    VALUES (job_id, format('%s %s', quote_literal(current_setting('application_name')), what))
$$;

CREATE FUNCTION judge.look_at_job() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('application_name') = 'shardline ' || OLD.worker THEN
        IF NEW.state = 'running' AND NEW.lease_until <> now()
            AND abs(extract(epoch
                FROM NEW.lease_until - now() - (SELECT lease FROM judge.times))) > 0.001 THEN
            PERFORM judge.note(OLD.id, format('gave itself a lease of %s at fence %s',
                NEW.lease_until - now(), OLD.fence));
        END IF;
    ELSIF current_setting('application_name') <> 'shardline-relay' THEN
        PERFORM judge.note(OLD.id, format('changed it from %s to %s at fence %s, which %s holds',
            OLD.state, NEW.state, OLD.fence, OLD.worker));
    ELSIF OLD.lease_until > now() THEN
        PERFORM judge.note(OLD.id, format('took it from %s before the lease of fence %s was over',
            OLD.worker, OLD.fence));
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER judge_jobs AFTER UPDATE ON jobs FOR EACH ROW
    WHEN (OLD.state = 'running' AND (OLD.state, OLD.fence, OLD.lease_until)
        IS DISTINCT FROM (NEW.state, NEW.fence, NEW.lease_until))
    EXECUTE FUNCTION judge.look_at_job();

CREATE FUNCTION judge.look_at_attempt() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM judge.note(OLD.job_id, format('changed the tokens of fence %s, which %s saved',
        OLD.fence, OLD.worker));
    RETURN NULL;
END $$;
CREATE TRIGGER judge_attempts AFTER UPDATE ON attempts FOR EACH ROW
    WHEN (OLD.tokens IS DISTINCT FROM NEW.tokens
        AND current_setting('application_name')
            NOT IN ('shardline ' || OLD.worker, 'shardline-relay'))
    EXECUTE FUNCTION judge.look_at_attempt();
"""
SEEN = "SELECT job_id, what FROM judge.stale ORDER BY at"


def install(database_url: str, *, lease_s: float) -> None:
    """From now on. Before anything is asked for: the tables are locked for a moment."""
    with psycopg.connect(database_url) as connection:
        connection.execute(INSTALL)
        connection.execute(rows.INSTALL)
        connection.execute("INSERT INTO judge.times VALUES (make_interval(secs => %s))", (lease_s,))


def stale_writes(database_url: str) -> list[Finding]:
    """I3: what was written by somebody who does not hold the job."""
    with psycopg.connect(database_url, row_factory=dict_row) as connection:
        return [
            Finding(invariant="I3", count="stale_commits", what=row["what"], job_id=row["job_id"])
            for row in connection.execute(SEEN)
        ]
