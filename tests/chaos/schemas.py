"""Random schemas through a whole stack with the real model at temperature 1, in calm and while its
stages are killed: every text must be valid, and the same one.

    python -m tests.chaos.schemas [--num 500] [--kill-every-s 20]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import jsonschema_rs

from shardline.client import Client
from shardline.contract.job import FinishReason, Job
from tests.real_model import NAME, real_model
from tests.schemas import random_schema
from tests.stack import Stack, is_running

NUM_STAGES = 2
MAX_TOKENS = 900
KV_MIB = 640
"""Of each stage: for as many jobs as run at once, and not a share of the whole machine."""
ABOUT = ("a cat", "an invoice", "a town by the sea", "une recette", "a person you like", "日本")


def request(number: int) -> dict[str, Any]:
    """One of them: a chat, held to its own schema."""
    ask = f"Describe {ABOUT[number % len(ABOUT)]} as JSON."
    return {
        "model": NAME,
        "messages": [{"role": "user", "content": ask}],
        "structured_outputs": {"json": random_schema(number)},
        "temperature": 1.0,
        "seed": number,
        "max_tokens": MAX_TOKENS,
        "max_crashes": 100,
    }


def is_valid(number: int, job: Job) -> bool:
    """Whether a job has ended by itself, with a text of its schema."""
    if job.result is None or job.result.finish_reason is not FinishReason.STOP:
        return False
    try:
        return bool(jsonschema_rs.is_valid(random_schema(number), json.loads(job.result.text)))
    except ValueError:
        return False


def run(client: Client, num: int) -> list[Job]:
    """Submits all, and waits for all."""
    ids = [client.submit(**request(number)) for number in range(num)]
    return list(client.wait(ids, timeout_s=3600))


@contextmanager
def kills(stack: Stack, every_s: float) -> Iterator[list[str]]:
    """Ends a stage with SIGKILL again and again; yields the names of those killed so far."""
    over = Event()
    killed: list[str] = []
    source = random.Random(7)

    def kill() -> None:
        while not over.wait(every_s):
            processes = stack.look()["processes"]
            name = source.choice([each for each in processes if each.startswith("stage")])
            if is_running(processes[name]):
                os.kill(processes[name], signal.SIGKILL)
                killed.append(name)

    thread = Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


def compare(calm: Sequence[Job], hurt: Sequence[Job]) -> dict[str, int]:
    """Counts what is as it must be, of either run."""
    return {
        "valid_calm": sum(is_valid(number, job) for number, job in enumerate(calm)),
        "valid_hurt": sum(is_valid(number, job) for number, job in enumerate(hurt)),
        "same": sum(
            one.result is not None
            and other.result is not None
            and one.result.token_ids == other.result.token_ids
            for one, other in zip(calm, hurt, strict=True)
        ),
    }


def measure(num: int, kill_every_s: float) -> dict[str, Any]:
    """Runs both on one stack; returns the counts."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "SHARDLINE_MODEL": str(real_model()),
            "SHARDLINE_MODEL_NAME": NAME,
            "SHARDLINE_STAGES": str(NUM_STAGES),
            "SHARDLINE_KV_MIB": str(KV_MIB),
        }
        stack = Stack(Path(folder), **settings)
        try:
            stack.start()
            urls = stack.urls
            with Client(database_url=urls["database"], redis_url=urls["redis"]) as client:
                began_s = time.monotonic()
                calm = run(client, num)
                calm_s = time.monotonic() - began_s
                with kills(stack, kill_every_s) as killed:
                    hurt = run(client, num)
        finally:
            stack.end()
    bad = [
        number
        for number, jobs in enumerate(zip(calm, hurt, strict=True))
        if not all(is_valid(number, job) for job in jobs)
    ]
    tokens = sum(job.result.usage.completion_tokens for job in calm if job.result is not None)
    counts = compare(calm, hurt)
    return {"num": num, **counts, "kills": len(killed), "bad": bad[:20]} | {
        "tokens": tokens,
        "calm_s": round(calm_s, 1),
    }


def main() -> int:
    """Prints the counts as one JSON line. Non-zero unless all are valid and the same."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=500)
    parser.add_argument("--kill-every-s", type=float, default=20.0)
    options = parser.parse_args()
    found = measure(options.num, options.kill_every_s)
    print(json.dumps(found))
    return 0 if found["valid_calm"] == found["valid_hurt"] == found["same"] == options.num else 1


if __name__ == "__main__":
    sys.exit(main())
