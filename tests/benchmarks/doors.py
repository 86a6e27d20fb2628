"""How fast doors accept while the stages are idle: jobs are held back by `delay_s`, so that only
acceptance counts. Paced requests go in turns to the gateway and to a bare door.

python -m tests.benchmarks.doors [--paced 2000] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from threading import Event
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from services.standalone.settings import CLERK
from shardline.client import Client
from shardline.contract.api_key import bearer
from tests.benchmarks.bare_door import bare_door
from tests.benchmarks.service import stack

NUM_MANY = 10_000
NUM_HTTP = 1_000
CONNECTIONS = 16
ROUNDS = 3
PACED_PER_S = 100
NUM_PACED = 2_000
PACED_CONNECTIONS = 4
HELD_BACK_S = 3_600.0


def main() -> None:
    """Prints jobs/s of each door, what paced requests took, and the memory that the gateway grew by
    as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--paced", type=int, default=NUM_PACED, help="paced requests")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    with stack(str(CLERK), "float32", 2) as up:
        gateway = psutil.Process(up["processes"]["gateway"])
        with Client(database_url=up["urls"]["database"], redis_url=up["urls"]["redis"]) as client:
            many = [submit_many(client, up["model"]) for _ in range(options.rounds)]
        http(up)
        paced_figures = in_turns(up, gateway, options.paced // options.rounds, options.rounds)
        before = gateway.memory_info().rss
        single = [http(up) for _ in range(options.rounds)]
        grown = (gateway.memory_info().rss - before) / 2**20
    figures = {
        "submit_many_jobs_per_s": many,
        "http_jobs_per_s": single,
        "gateway_grew_mib": grown,
        "medians": [statistics.median(many), statistics.median(single)],
        "paced_per_s": PACED_PER_S,
        **paced_figures,
    }
    print(json.dumps(figures))


def in_turns(
    up: Mapping[str, Any], gateway: psutil.Process, num: int, rounds: int
) -> dict[str, float]:
    """What `num` paced requests take in each round, at the gateway and at the bare door."""
    taken_ms: dict[str, list[float]] = {"paced": [], "bare": []}
    cpu_s = dict.fromkeys(taken_ms, 0.0)
    with bare_door(up["urls"]["database"]) as (url, pid):
        doors = {"paced": (up["urls"]["gateway"], gateway), "bare": (url, psutil.Process(pid))}
        for _ in range(rounds):
            for name, (address, process) in doors.items():
                began_s = sum(process.cpu_times()[:2])
                taken_ms[name] += paced(up, address, num)
                cpu_s[name] += sum(process.cpu_times()[:2]) - began_s
    figures = {}
    for name, found in taken_ms.items():
        figures[f"{name}_p50_ms"] = statistics.median(found)
        figures[f"{name}_p99_ms"] = statistics.quantiles(found, n=100)[-1]
        figures[f"{name}_cpu_ms"] = cpu_s[name] * 1e3 / len(found)
    return figures


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


def paced(up: Mapping[str, Any], url: str, num: int) -> list[float]:
    """Milliseconds of each of `num` requests with a key, sent at their time whatever the answers to
    others."""
    address = urlsplit(url)
    headers = {**bearer(up["api_key"]), "content-type": "application/json"}
    began_s = time.perf_counter()
    never = Event()

    def push(numbers: range) -> list[float]:
        assert address.hostname is not None
        connection = HTTPConnection(address.hostname, address.port, timeout=60)
        taken_ms = []
        for number in numbers:
            body = json.dumps(request(up["model"], number))
            never.wait(max(0.0, began_s + number / PACED_PER_S - time.perf_counter()))
            sent_s = time.perf_counter()
            connection.request("POST", "/v1/jobs", body=body, headers=headers)
            answer = connection.getresponse()
            answer.read()
            taken_ms.append((time.perf_counter() - sent_s) * 1e3)
            assert answer.status < 300, answer.status
        connection.close()
        return taken_ms

    with ThreadPoolExecutor(PACED_CONNECTIONS) as pool:
        parts = [
            pool.submit(push, range(start, num, PACED_CONNECTIONS))
            for start in range(PACED_CONNECTIONS)
        ]
        return [one for part in parts for one in part.result()]


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
