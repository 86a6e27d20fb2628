"""From any language that speaks Postgres: an INSERT. Accepted when your transaction commits.

NOTIFY says that some job has ended; the row says which, also if a NOTIFY was missed.
"""

import os

import psycopg

INSERT = """
INSERT INTO jobs (model, prompt, params) VALUES ('clerk', 'sort: 31, 4, 15 =', '{"temperature": 0}') RETURNING id
"""
ENDED = """
SELECT jobs.state, results.text FROM jobs LEFT JOIN results ON results.job_id = jobs.id
WHERE jobs.id = %s AND jobs.finished_at IS NOT NULL
"""

with psycopg.connect(os.environ["SHARDLINE_DATABASE_URL"], autocommit=True) as connection:
    connection.execute("LISTEN shardline_done")
    (job_id,) = connection.execute(INSERT).fetchone()
    while (row := connection.execute(ENDED, (job_id,)).fetchone()) is None:
        for _ in connection.notifies(timeout=1, stop_after=1):
            pass
    print(job_id, *row)
