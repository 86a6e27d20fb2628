"""How evenly a running stack serves tenants that wait for one model: the rows' tokens in every 30
seconds. And how long the first token of an interactive request takes beside a full batch.

python -m tests.benchmarks.shares [--seconds 90] [--seats 16]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from sqlalchemy import Connection, text

from shardline.client import Client
from shardline.store.connection.database import transaction
from shardline.store.tenants.quotas import set_weight
from tests.benchmarks.model import VOCABULARY, make_sized
from tests.benchmarks.service import stack

CACHE = Path.home() / ".cache" / "shardline-bench"
WINDOW_S = 30
SETTLE_S = 15
"""Until the first jobs have ended: before, each counts as long as it may become."""
FEED_S = 0.2
NUM_TIMED = 20

HAD = text("""
SELECT tenant_id, sum(cardinality(prompt_ids) + num_tokens) FROM (
    SELECT jobs.tenant_id, jobs.prompt_ids, results.completion_tokens AS num_tokens
    FROM jobs JOIN results ON results.job_id = jobs.id
    UNION ALL
    SELECT jobs.tenant_id, jobs.prompt_ids, cardinality(attempts.tokens)
    FROM jobs JOIN attempts ON attempts.job_id = jobs.id AND attempts.fence = jobs.fence
    WHERE jobs.state = 'running' AND cardinality(attempts.tokens) > 0
) AS had GROUP BY 1
""")
WAITING = text("SELECT count(*) FROM jobs WHERE tenant_id = :tenant AND state = 'queued'")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A tenant that keeps jobs waiting."""

    tenant: str
    weight: float = 1.0
    num_waiting: int = 100
    num_new: int = 32


LOADS = {
    "queues": (
        Load(tenant="small", num_waiting=40),
        Load(tenant="large", num_waiting=4_000),
    ),
    "weights": (
        Load(tenant="one", weight=1),
        Load(tenant="two", weight=2, num_waiting=200),
        Load(tenant="four", weight=4, num_waiting=400),
    ),
    "lengths": (
        Load(tenant="short", num_new=8, num_waiting=400),
        Load(tenant="long", num_new=128),
    ),
}


def main() -> None:
    """Prints, of each mix, the worst share of any window over what the weights give, and the times
    of an interactive request, as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=90)
    parser.add_argument("--seats", type=int, default=16)
    options = parser.parse_args()
    model = make_sized(CACHE, "float32", "tiny")
    figures: dict[str, Any] = {}
    for name, loads in LOADS.items():
        with stack(str(model), "float32", 2, SHARDLINE_SEATS=str(options.seats)) as up:
            idle_s = first_tokens(up) if name == "queues" else []
            with feeding(up, loads):
                figures[name] = shares(up, loads, options.seconds)
                if idle_s:
                    busy_s = first_tokens(up)
                    figures["first_token_ms"] = {
                        "idle": statistics.median(idle_s) * 1e3,
                        "beside a full batch": statistics.median(busy_s) * 1e3,
                        "ratio": statistics.median(busy_s) / statistics.median(idle_s),
                    }
    print(json.dumps(figures))


def shares(up: Mapping[str, Any], loads: Sequence[Load], seconds: int) -> dict[str, Any]:
    """Each tenant's tokens/s, and its least and most of any window over its part by weight."""
    pause = Event()
    pause.wait(SETTLE_S)
    samples: list[tuple[float, dict[str, int]]] = []
    with transaction(up["urls"]["database"]) as connection:
        for _ in range(seconds + 1):
            samples.append((time.monotonic(), had(connection)))
            pause.wait(1.0)
    total = sum(load.weight for load in loads)
    ratios: dict[str, list[float]] = {load.tenant: [] for load in loads}
    for (_, before), (_, after) in zip(samples, samples[WINDOW_S:], strict=False):
        gained = {load.tenant: after[load.tenant] - before[load.tenant] for load in loads}
        for load in loads:
            part = sum(gained.values()) * load.weight / total
            ratios[load.tenant].append(gained[load.tenant] / part)
    (began_s, first), (ended_s, last) = samples[0], samples[-1]
    return {
        load.tenant: {
            "tokens_per_s": round((last[load.tenant] - first[load.tenant]) / (ended_s - began_s)),
            "least": round(min(ratios[load.tenant]), 3),
            "most": round(max(ratios[load.tenant]), 3),
        }
        for load in loads
    }


def had(connection: Connection) -> dict[str, int]:
    """Tokens by tenant."""
    return {row.tenant_id: row.sum for row in connection.execute(HAD)}


@contextmanager
def feeding(up: Mapping[str, Any], loads: Sequence[Load]) -> Iterator[None]:
    """While inside, every tenant waits for the model."""
    ended = Event()

    def feed(load: Load) -> None:
        url = up["urls"]["database"]
        with Client(database_url=url, tenant=load.tenant) as client:
            while not ended.wait(FEED_S):
                with transaction(url) as connection:
                    waiting = connection.scalar(WAITING, {"tenant": load.tenant}) or 0
                client.submit_many(
                    [request(up["model"], load.num_new) for _ in range(load.num_waiting - waiting)]
                )

    with transaction(up["urls"]["database"]) as connection:
        for load in loads:
            set_weight(connection, load.tenant, load.weight)
    with ThreadPoolExecutor(len(loads)) as pool:
        feeders = [pool.submit(feed, load) for load in loads]
        yield
        ended.set()
        for feeder in feeders:
            feeder.result()


def first_tokens(up: Mapping[str, Any]) -> list[float]:
    """Seconds from the submission of a request of the highest priority to its first token."""
    urls = up["urls"]
    taken_s = []
    with Client(database_url=urls["database"], redis_url=urls["redis"]) as client:
        for _ in range(NUM_TIMED):
            began_s = time.perf_counter()
            job_id = client.submit(**request(up["model"], 4), priority=0)
            next(iter(client.stream(job_id)))
            taken_s.append(time.perf_counter() - began_s)
            client.wait([job_id])
    return taken_s


def request(model: str, num_new: int) -> dict[str, Any]:
    """A job of 32 to 96 random tokens and `num_new` new ones."""
    ids = [random.randrange(3, VOCABULARY) for _ in range(random.randint(32, 96))]
    return {"model": model, "prompt": ids, "max_tokens": num_new, "ignore_eos": True}


if __name__ == "__main__":
    main()
