"""The store's statements on tables with millions of rows: their times, and the plans beside them.

python -m tests.benchmarks.scale --home DIR [--waiting 1000000] [--ended 10000000] [--delayed 10000]
[--rounds 50]
    [--only WORD …]

The tables stay in DIR, and a filling that was cut short goes on: ten million rows take minutes,
once.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, event, text

from shardline.contract.ids import new_id
from shardline.contract.job import JobRequest
from shardline.store import jobs
from tests.benchmarks.scale_pieces import Piece, pieces
from tests.benchmarks.scale_tables import MODEL, tables

RESULTS = Path(__file__).parent / "results"
TARGET_MS = 50.0
NUM_THREADS = 8
NUM_COMMITS = 200


def main() -> None:
    """Prints one JSON line for each piece of work, with the times of its slowest statement; writes
    the plans of one round more."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, required=True)
    for name, default in {
        "waiting": 1_000_000,
        "ended": 10_000_000,
        "delayed": 10_000,
        "rounds": 50,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--only", nargs="*", default=[""], help="pieces with one of these words in their name"
    )
    options = parser.parse_args()
    with tables(
        options.home, waiting=options.waiting, ended=options.ended, delayed=options.delayed
    ) as engine:
        plans: list[str] = []
        for piece in pieces(engine):
            if not any(word in piece.name for word in options.only):
                continue
            wall_ms, busy_ms = zip(
                *(timed(engine, piece) for _ in range(options.rounds)), strict=True
            )
            figures = {
                "p50_ms": percentile(50, wall_ms),
                "p99_ms": percentile(99, wall_ms),
                "busy_p50_ms": percentile(50, busy_ms),
                "busy_p99_ms": percentile(99, busy_ms),
            }
            print(
                json.dumps(
                    {"work": piece.name, **figures, "ok": figures["busy_p99_ms"] <= TARGET_MS}
                ),
                flush=True,
            )
            plans += [f"== {piece.name}: {figures}", *explained(engine, piece)]
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "scale-plans.txt").write_text("\n".join(plans) + "\n")
        if "commits" in options.only:
            print(
                json.dumps(
                    {
                        "commits_per_s": {
                            "with the bell": commits(engine),
                            "without": without_bell(engine),
                        }
                    }
                )
            )


def percentile(percent: float, times_ms: Sequence[float]) -> float:
    """Of all rounds."""
    return round(sorted(times_ms)[round(percent / 100 * (len(times_ms) - 1))], 1)


def timed(engine: Engine, piece: Piece) -> tuple[float, float]:
    """Milliseconds of its slowest statement until the client has its rows, and those in which the
    server computed: what else runs on the machine makes no difference to them. Without what comes
    before and without the end of the transaction, which is undone."""
    wall_s = [0.0]
    busy_s = [0.0]
    with engine.connect() as connection:
        server = Path(f"/proc/{connection.scalar(text('SELECT pg_backend_pid()'))}/schedstat")

        def computed_s() -> float:
            return int(server.read_text().split()[0]) / 1e9

        def before(*_: Any) -> None:
            busy_s.append(-computed_s())
            wall_s.append(-time.perf_counter())

        def after(*_: Any) -> None:
            wall_s[-1] += time.perf_counter()
            busy_s[-1] += computed_s()

        piece.before(connection)
        event.listen(engine, "before_cursor_execute", before)
        event.listen(engine, "after_cursor_execute", after)
        try:
            piece.work(connection)
        finally:
            event.remove(engine, "before_cursor_execute", before)
            event.remove(engine, "after_cursor_execute", after)
        connection.rollback()
    return max(wall_s) * 1_000, max(busy_s) * 1_000


def explained(engine: Engine, piece: Piece) -> list[str]:
    """The plan of each of its statements, which then runs."""
    lines: list[str] = []

    def explain(_connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        cursor.execute("SAVEPOINT explained")
        cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, COSTS OFF) {statement}", parameters)
        lines.extend(line for (line,) in cursor.fetchall())
        cursor.execute("ROLLBACK TO explained")

    with engine.connect() as connection:
        piece.before(connection)
        event.listen(engine, "before_cursor_execute", explain)
        try:
            piece.work(connection)
        finally:
            event.remove(engine, "before_cursor_execute", explain)
        connection.rollback()
    return lines


def commits(engine: Engine) -> float:
    """Transactions of one insert each, by several threads."""

    def insert(_number: int) -> None:
        with engine.begin() as connection:
            jobs.insert_jobs(connection, [JobRequest(model=MODEL, prompt="text", id=new_id())])

    began_s = time.perf_counter()
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        list(threads.map(insert, range(NUM_COMMITS * NUM_THREADS)))
    return round(NUM_COMMITS * NUM_THREADS / (time.perf_counter() - began_s), 1)


def without_bell(engine: Engine) -> float:
    """The same without NOTIFY, whose queue has one lock for the whole server."""
    trigger = "ALTER TABLE jobs {} TRIGGER shardline_new_jobs"
    with engine.begin() as connection:
        connection.execute(text(trigger.format("DISABLE")))
    try:
        return commits(engine)
    finally:
        with engine.begin() as connection:
            connection.execute(text(trigger.format("ENABLE")))


if __name__ == "__main__":
    main()
