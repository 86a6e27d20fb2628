"""Tables with millions of rows, filled once and kept in a folder. Owns what is in them; knows no
query of the store.

Rows are written by pieces, without triggers, and the indexes are built afterwards: so ten million
take minutes, and a filling that was cut short goes on where it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, text

from services.standalone.servers import FAST, Postgres
from shardline.store import models, pipelines
from shardline.store.connection.database import connect
from tests.conftest import migrate

MODEL = "m"
RARE = "rare"
TENANT = "default"
OTHER = "other"
SEATS = 64
PIECE = 250_000
LARGE = ("jobs", "attempts", "results")

FILLING = {
    **FAST,
    "autovacuum": "off",
    "synchronous_commit": "off",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "max_wal_size": "8GB",
    "maintenance_work_mem": "1GB",
}

# A tenth belongs to another tenant, one row of 400 to a rare model. Delayed jobs are the oldest:
# all others lie behind them.
WAITING = """
INSERT INTO jobs (id, tenant_id, model, prompt, prompt_ids, max_tokens, priority, created_at,
    prepared_at, not_before, idempotency_key)
SELECT md5('waiting ' || n)::uuid, CASE n % 10 WHEN 0 THEN 'other' ELSE 'default' END,
    CASE n % 400 WHEN 0 THEN 'rare' ELSE 'm' END, repeat('text ', 12), '{5,6}', 8, n / 10 % 10,
    now() - make_interval(secs => (CAST(:last_of_all AS int) - n) / 10.0), now(),
    now() + make_interval(secs => CASE WHEN n <= CAST(:delayed AS int) THEN 31536000 ELSE 0 END),
    'key ' || n
FROM generate_series(CAST(:first AS int), CAST(:last AS int)) AS n
"""

# One of 500 has not succeeded. Some ended long after they began.
ENDED = """
INSERT INTO jobs (id, tenant_id, model, prompt, prompt_ids, max_tokens, created_at, prepared_at,
    fence, state, finished_at, error)
SELECT md5('ended ' || n)::uuid, CASE n % 10 WHEN 0 THEN 'other' ELSE 'default' END,
    CASE n % 400 WHEN 0 THEN 'rare' ELSE 'm' END, repeat('text ', 12), '{5,6}', 8,
    now() - make_interval(secs => 1e6 + n), now(), 1, state, now() - make_interval(secs => 9e5 + n),
    CASE WHEN n % 5000 = 1 THEN '{"code": "crashed"}'::jsonb END
FROM generate_series(CAST(:first AS int), CAST(:last AS int)) AS n CROSS JOIN LATERAL (
    SELECT CASE
        WHEN n % 500 < 4 THEN (ARRAY['succeeded', 'failed', 'cancelled', 'expired'])[1 + n % 500]
        ELSE 'succeeded' END AS state
) AS ended
"""

ATTEMPTS = """
INSERT INTO attempts (job_id, fence, pipeline, epoch, worker, fingerprint, exactness, outcome,
    ended_at, tokens)
SELECT md5('ended ' || n)::uuid, 1, 'p', 1, 'h', 'w', 'x', 'succeeded', now(), '{7,8,9}'
FROM generate_series(CAST(:first AS int), CAST(:last AS int)) AS n
"""

RESULTS = """
INSERT INTO results (job_id, fence, text, token_ids, prompt_tokens, completion_tokens,
    finish_reason, exact)
SELECT md5('ended ' || n)::uuid, 1, repeat('text ', 12), '{7,8,9}', 2, 3, 'stop', true
FROM generate_series(CAST(:first AS int), CAST(:last AS int)) AS n WHERE n % 500 NOT BETWEEN 1 AND 3
"""

KINDS = {"waiting": WAITING, "ended": ENDED, "attempts": ATTEMPTS, "results": RESULTS}


@contextmanager
def tables(home: Path, *, waiting: int, ended: int, delayed: int) -> Iterator[Engine]:
    """A server with the defaults of a fresh installation, on a folder with so many rows."""
    mark = home / f"filled-{waiting}-{ended}-{delayed}"
    if not mark.exists():
        with _server(home, FILLING) as server:
            migrate(server.url())
            engine = connect(server.url(), statement_timeout_s=86_400)
            _fill(
                engine,
                {
                    "waiting": waiting + delayed,
                    **dict.fromkeys(("ended", "attempts", "results"), ended),
                },
                delayed,
            )
            engine.dispose()
        mark.touch()
    with _server(home, {}) as server:
        migrate(server.url())
        engine = connect(server.url(), statement_timeout_s=3_600, pool_size=8)
        with engine.begin() as connection:
            _take_pipeline(connection)
        yield engine
        engine.dispose()


@contextmanager
def _server(home: Path, settings: dict[str, str]) -> Iterator[Postgres]:
    server = Postgres(home, settings=settings)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def _fill(engine: Engine, nums: dict[str, int], delayed: int) -> None:
    with engine.begin() as connection:
        connection.execute(
            text("CREATE TABLE IF NOT EXISTS filled (kind text PRIMARY KEY, last int NOT NULL)")
        )
        connection.execute(text("INSERT INTO tenants (id) VALUES ('other') ON CONFLICT DO NOTHING"))
        # Until they are built again, nobody keeps the indexes.
        unused = (
            "UPDATE pg_index SET indisready = false, indisvalid = false"
            " WHERE indrelid = CAST(:name AS regclass)"
        )
        for name in LARGE:
            if connection.scalar(text("SELECT count(*) = 0 FROM filled")):
                connection.execute(text(unused), {"name": name})
        for kind in KINDS:
            connection.execute(
                text("INSERT INTO filled VALUES (:kind, 0) ON CONFLICT DO NOTHING"), {"kind": kind}
            )
    for kind, num in nums.items():
        _fill_kind(engine, kind, num, delayed)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for name in LARGE:
            left = (
                "SELECT indexrelid::regclass FROM pg_index"
                " WHERE NOT indisready AND indrelid = CAST(:name AS regclass)"
            )
            for index in connection.scalars(text(left), {"name": name}).all():
                print(f"building {index}", flush=True)
                connection.exec_driver_sql(f"REINDEX INDEX {index}")
            print(f"vacuuming {name}", flush=True)
            connection.exec_driver_sql(f"VACUUM (FREEZE, ANALYZE) {name}")
        connection.exec_driver_sql("CHECKPOINT")


def _fill_kind(engine: Engine, kind: str, num: int, delayed: int) -> None:
    last = 0
    while last < num:
        with engine.begin() as connection:
            connection.execute(text("SET LOCAL session_replication_role = replica"))
            done = (
                connection.scalar(
                    text("SELECT last FROM filled WHERE kind = :kind"), {"kind": kind}
                )
                or 0
            )
            last = min(done + PIECE, num)
            if done < num:
                values = {"first": done + 1, "last": last, "last_of_all": num, "delayed": delayed}
                connection.execute(text(KINDS[kind]), values)
                connection.execute(
                    text("UPDATE filled SET last = :last WHERE kind = :kind"),
                    {"last": last, "kind": kind},
                )
        print(f"{kind} {last:,} of {num:,}", flush=True)


def _take_pipeline(connection: Connection) -> None:
    models.register_model(connection, model_row(MODEL))
    pipelines.take_epoch(connection, "p", model=MODEL, fingerprint="w", head="h", lease_s=86_400)
    epoch = connection.scalar(text("SELECT epoch FROM pipelines WHERE id = 'p'")) or 0
    pipelines.ready(connection, "p", epoch, seats=SEATS, stages=[], exact=True, kv_tokens=1 << 20)


def model_row(name: str) -> dict[str, Any]:
    """A model that takes token ids only."""
    sizes = {"context_length": 32, "vocab_size": 100}
    return {
        "name": name,
        **sizes,
        "eos_token_ids": [1],
        "tokenizer": "",
        "special_tokens": {},
        "fingerprint": "w",
    }
