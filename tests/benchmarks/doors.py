"""How fast doors accept while the stages are idle: jobs are held back by `delay_s`, so that only
acceptance counts.

python -m tests.benchmarks.doors
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil

from services.standalone.settings import CLERK
from shardline.client import Client
from shardline.contract.api_key import bearer
from tests.benchmarks.service import stack

NUM_MANY = 10_000
NUM_HTTP = 1_000
CONNECTIONS = 16
ROUNDS = 3
HELD_BACK_S = 3_600.0


def main() -> None:
    """Prints jobs/s of each door and the memory that the gateway grew by as one JSON line."""
    with stack(str(CLERK), "float32", 2) as up:
        gateway = psutil.Process(up["processes"]["gateway"])
        with Client(database_url=up["urls"]["database"], redis_url=up["urls"]["redis"]) as client:
            many = [submit_many(client, up["model"]) for _ in range(ROUNDS)]
        http(up)
        before = gateway.memory_info().rss
        single = [http(up) for _ in range(ROUNDS)]
        grown = (gateway.memory_info().rss - before) / 2**20
    figures = {"submit_many_jobs_per_s": many, "http_jobs_per_s": single, "gateway_grew_mib": grown}
    print(json.dumps({**figures, "medians": [statistics.median(many), statistics.median(single)]}))


def submit_many(client: Client, model: str) -> float:
    """Jobs/s of one call with NUM_MANY prompts."""
    requests = [request(model, number) for number in range(NUM_MANY)]
    began_s = time.perf_counter()
    assert len(client.submit_many(requests)) == NUM_MANY
    return NUM_MANY / (time.perf_counter() - began_s)


def http(up: Mapping[str, Any]) -> float:
    """Jobs/s through POST /v1/jobs with CONNECTIONS connections."""

    def push(numbers: range) -> None:
        with httpx.Client(
            base_url=up["urls"]["gateway"], headers=bearer(up["api_key"]), timeout=60
        ) as client:
            for number in numbers:
                client.post("/v1/jobs", json=request(up["model"], number)).raise_for_status()

    began_s = time.perf_counter()
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        for done in [
            pool.submit(push, range(start, NUM_HTTP, CONNECTIONS)) for start in range(CONNECTIONS)
        ]:
            done.result()
    return NUM_HTTP / (time.perf_counter() - began_s)


def request(model: str, number: int) -> dict[str, object]:
    """One of many alike."""
    return {
        "model": model,
        "prompt": f"words: {number % 1000} =",
        "max_tokens": 8,
        "delay_s": HELD_BACK_S,
    }


if __name__ == "__main__":
    main()
