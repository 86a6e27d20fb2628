"""From Python, inside your own transaction: the order and its job are stored together, or neither
is."""

import os

from sqlalchemy import create_engine, make_url, text
from sqlalchemy.orm import Session

from shardline import Client

engine = create_engine(
    make_url(os.environ["SHARDLINE_DATABASE_URL"]).set(drivername="postgresql+psycopg")
)

with Client() as client, Session(engine) as session:
    with session.begin():
        session.execute(
            text(
                "CREATE TABLE IF NOT EXISTS example_orders (id bigserial PRIMARY KEY, job uuid NOT NULL)"
            )
        )
        job_id = client.submit("clerk", "sort: 31, 4, 15 =", temperature=0, session=session)
        session.execute(text("INSERT INTO example_orders (job) VALUES (:job)"), {"job": job_id})
    # A rollback would have taken the job back too. From the COMMIT on it runs.
    print(job_id, client.wait(job_id, timeout_s=60).result.text)
