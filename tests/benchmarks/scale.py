"""The store's statements on tables with millions of rows: their times, and the plans beside them.

python -m tests.benchmarks.scale [--waiting 200000] [--ended 1000000] [--delayed 10000] [--rounds 50]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Engine, event, text

from services.standalone.servers import Postgres
from shardline.ids import new_id
from shardline.job import JobRequest, JobState
from shardline.store import claims, crashes, jobs, listing, models, outbox, pipelines, preparation, retention, sweeps
from shardline.store.claims import Beat
from shardline.store.database import connect
from tests.conftest import migrate

RESULTS = Path(__file__).parent / "results"
MODEL = "m"
SEATS, BATCH = 64, 256
NUM_THREADS, NUM_COMMITS = 8, 200
Work = Callable[[Connection], object]

# A tenth belongs to another tenant, one row of 400 to a rare model, one ended row of 500 has not succeeded.
ROWS = """
INSERT INTO tenants (id) VALUES ('other') ON CONFLICT DO NOTHING;
INSERT INTO jobs (id, tenant_id, model, prompt, prompt_ids, max_tokens, priority, created_at, prepared_at, not_before,
    idempotency_key)
SELECT gen_random_uuid(), CASE n %% 10 WHEN 0 THEN 'other' ELSE 'default' END,
    CASE n %% 400 WHEN 0 THEN 'rare' ELSE 'm' END, 'text', '{{5,6}}', 8, n %% 10,
    now() - make_interval(secs => n / 10.0), now(),
    now() + make_interval(secs => CASE WHEN n > {waiting} THEN 86400 ELSE 0 END), 'key ' || n
FROM generate_series(1, {waiting} + {delayed}) AS n;
INSERT INTO jobs (id, tenant_id, model, prompt, prompt_ids, max_tokens, created_at, prepared_at, fence, state,
    finished_at)
SELECT gen_random_uuid(), CASE n %% 10 WHEN 0 THEN 'other' ELSE 'default' END,
    CASE n %% 400 WHEN 0 THEN 'rare' ELSE 'm' END, 'text', '{{5,6}}', 8,
    now() - make_interval(secs => 1e6 + n), now(), 1,
    (ARRAY['succeeded', 'failed', 'cancelled', 'expired'])[1 + CASE WHEN n %% 500 < 3 THEN 1 + n %% 500 ELSE 0 END],
    now() - make_interval(secs => n)
FROM generate_series(1, {ended}) AS n;
INSERT INTO attempts (job_id, fence, pipeline, epoch, worker, fingerprint, exactness, outcome, ended_at)
SELECT id, 1, 'p', 1, 'h', 'w', 'x', state, now() FROM jobs WHERE fence = 1;
INSERT INTO results (job_id, fence, text, token_ids, prompt_tokens, completion_tokens, finish_reason, exact)
SELECT id, 1, 'text', '{{7}}', 2, 1, 'stop', true FROM jobs WHERE state = 'succeeded';
"""


def main() -> None:
    """Prints one JSON line for each piece of work, and writes the plans of its last round."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"waiting": 200_000, "ended": 1_000_000, "delayed": 10_000, "rounds": 50}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with tables(options.waiting, options.ended, options.delayed) as engine:
        plans: list[str] = []
        for name, work in pieces(engine).items():
            times_ms = [timed(engine, work) for _ in range(options.rounds)]
            p99 = sorted(times_ms)[int(0.99 * (len(times_ms) - 1))]
            print(json.dumps({"work": name, "p50_ms": round(statistics.median(times_ms), 1), "p99_ms": round(p99, 1)}))
            plans += [f"== {name}", *explained(engine, work)]
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "scale-plans.txt").write_text("\n".join(plans) + "\n")
        print(json.dumps({"commits_per_s": {"with the bell": commits(engine), "without": without_the_bell(engine)}}))


@contextmanager
def tables(waiting: int, ended: int, delayed: int) -> Iterator[Engine]:
    """A server of its own, with the defaults of a fresh installation and so many rows."""
    with tempfile.TemporaryDirectory(prefix="shardline-scale-") as folder:
        server = Postgres(Path(folder))
        try:
            server.start()
            migrate(server.url())
            engine = connect(server.url(), statement_timeout_s=3_600, pool_size=NUM_THREADS)
            with engine.begin() as connection:
                models.register_model(connection, model_row())
                pipelines.take_epoch(connection, "p", model=MODEL, fingerprint="w", head="h", lease_s=86_400)
                pipelines.ready(connection, "p", 1, seats=SEATS, stages=[], exact=True)
                connection.exec_driver_sql(ROWS.format(waiting=waiting, ended=ended, delayed=delayed))
            with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.exec_driver_sql("VACUUM (ANALYZE) jobs, attempts, results")
            yield engine
            engine.dispose()
        finally:
            server.abandon()


def model_row() -> dict[str, Any]:
    """A model that takes token ids only."""
    sizes = {"context_length": 32, "vocab_size": 100}
    return {"name": MODEL, **sizes, "eos_token_ids": [1], "tokenizer": "", "special_tokens": {}, "fingerprint": "w"}


def pieces(engine: Engine) -> dict[str, Work]:
    """What doors, relays and heads do, each in a transaction that is rolled back."""
    with engine.connect() as connection:
        query = text("SELECT id FROM jobs WHERE state = 'queued' AND model = :model AND not_before <= now() LIMIT :num")
        ids = list(connection.scalars(query, {"model": MODEL, "num": SEATS}))
        (last,) = connection.scalars(text("SELECT id FROM jobs WHERE fence = 1 AND tenant_id = 'default' LIMIT 1"))
    keyed = [
        JobRequest(model=MODEL, prompt="text", idempotency_key=f"key {n}")
        for n in range(1, BATCH)
        if n % 10 and n % 400
    ]
    others: dict[str, Work] = {
        "insert 256": lambda connection: jobs.insert_jobs(connection, [request() for _ in range(BATCH)]),
        "repeat 230 by key": lambda connection: jobs.insert_jobs(connection, keyed),
        "get": lambda connection: jobs.get_job(connection, ids[0]),
        "cancel": lambda connection: jobs.request_cancel(connection, ids[:1]),
        "take unprepared": lambda connection: preparation.take_unprepared(connection, lease_s=10.0),
        "stamp": lambda connection: outbox.stamp(connection, resend_s=15.0),
        "suspects": lambda connection: crashes.suspects(connection, [str(job_id) for job_id in ids]),
        "claim, beat, release 64": lambda connection: run_of(connection, ids),
        "sweep waiting": lambda connection: sweeps.sweep_waiting(connection, lambda *_: ""),
        "sweep leases": lambda connection: sweeps.sweep_leases(connection, lambda *_: "", lease_s=10.0),
        "counts": sweeps.counts,
        "delete 500 old": lambda connection: retention.delete_old(connection, age_s=86_400.0),
    }
    return lists(last) | others


def lists(last: UUID) -> dict[str, Work]:
    """Each filter, its first page and the one after `last`."""
    filters = product((None, *JobState), (None, MODEL, "rare"), (None, "default"), (None, last))
    return {
        f"list {state or 'all'}, {model or 'any'}, {tenant or 'any'}, {'first' if after is None else 'next'}": (
            partial(listing.list_jobs, state=state, model=model, tenant=tenant, after=after)
        )
        for state, model, tenant, after in filters
    }


def request() -> JobRequest:
    """A new one."""
    return JobRequest(model=MODEL, prompt="text", id=new_id())


def run_of(connection: Connection, ids: list[Any]) -> None:
    """A head's part of a job's life."""
    head: Any = {"worker": "h", "pipeline": "p", "epoch": 1, "fingerprint": "w", "exactness": "x"}
    times: Any = {"lease_s": 10.0, "exact_wait_s": 60.0}
    keys = [(one.job_id, one.fence) for one in claims.claim(connection, ids, **head, **times)]
    beats = [Beat(job_id=job_id, fence=fence, start=0, ids=(7,)) for job_id, fence in keys]
    assert len(claims.heartbeat(connection, beats, lease_s=10.0)) == len(claims.release(connection, keys)) == len(ids)


def timed(engine: Engine, work: Work) -> float:
    """Milliseconds, without the end of the transaction."""
    with engine.connect() as connection:
        began_s = time.perf_counter()
        work(connection)
        elapsed_s = time.perf_counter() - began_s
        connection.rollback()
    return elapsed_s * 1_000


def explained(engine: Engine, work: Work) -> list[str]:
    """The plan of each of its statements, which then runs."""
    lines: list[str] = []

    def explain(_connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        cursor.execute("SAVEPOINT explained")
        cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, COSTS OFF) {statement}", parameters)
        lines.extend(line for (line,) in cursor.fetchall())
        cursor.execute("ROLLBACK TO explained")

    event.listen(engine, "before_cursor_execute", explain)
    try:
        timed(engine, work)
    finally:
        event.remove(engine, "before_cursor_execute", explain)
    return lines


def commits(engine: Engine) -> float:
    """Transactions of one insert each, by several threads."""

    def insert(_number: int) -> None:
        with engine.begin() as connection:
            jobs.insert_jobs(connection, [request()])

    began_s = time.perf_counter()
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        list(threads.map(insert, range(NUM_COMMITS * NUM_THREADS)))
    return round(NUM_COMMITS * NUM_THREADS / (time.perf_counter() - began_s), 1)


def without_the_bell(engine: Engine) -> float:
    """The same without NOTIFY, whose queue has one lock for the whole server."""
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE jobs DISABLE TRIGGER shardline_new_jobs"))
    return commits(engine)


if __name__ == "__main__":
    main()
