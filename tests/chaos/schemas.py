"""Schemas through a whole stack with the real model at temperature 1, in calm and while its stages
are killed: every text must be valid, and the same one.

    python -m tests.chaos.schemas [--num 500] [--kill-every-s 20] [--suite FOLDER]

They are random ones, or with `--suite` those of a folder of the JSON Schema Test Suite, such as its
tests/draft2020-12, of which some are refused and some have endless texts.
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
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import jsonschema_rs
import psycopg

from shardline.client import Client
from shardline.contract.job import FinishReason, Job
from tests.meanwhile import meanwhile
from tests.real_model import NAME, real_model
from tests.schemas import random_schema
from tests.stack import Stack, is_running

Schema = dict[str, Any]

NUM_STAGES = 2
MAX_TOKENS = 900
KV_MIB = 640
"""Of each stage: for as many jobs as run at once, and not a share of the whole machine."""
SUITE_TOKENS = 100
MAX_CRASHES = 100
"""Innocent jobs outlive any number of kills."""
LOOK_S = 0.5
ABOUT = ("a cat", "an invoice", "a town by the sea", "une recette", "a person you like", "日本")


def random_schemas(num: int) -> list[Schema]:
    """So many, each with short texts."""
    return [random_schema(number) for number in range(num)]


def suite_schemas(folder: Path) -> list[Schema]:
    """Each schema of the suite's files once, in their order."""
    files = sorted(folder.glob("*.json"))
    groups = [group for file in files for group in json.loads(file.read_text("utf-8"))]
    texts = (json.dumps(group["schema"]) for group in groups)
    return [json.loads(text) for text in dict.fromkeys(texts) if text[0] == "{"]


def request(number: int, schema: Schema, max_tokens: int) -> dict[str, Any]:
    """One of them: a chat, held to its own schema."""
    ask = f"Describe {ABOUT[number % len(ABOUT)]} as JSON."
    return {
        "model": NAME,
        "messages": [{"role": "user", "content": ask}],
        # As text: Postgres sorts the names of an object.
        "structured_outputs": {"json": json.dumps(schema)},
        "temperature": 1.0,
        "seed": number,
        "max_tokens": max_tokens,
        "max_crashes": MAX_CRASHES,
    }


def how_it_ended(schema: Schema, job: Job) -> str:
    """`valid` if it has ended by itself with a text of its schema; `cut` by the limit of tokens, or
    `endless` if the schema is recursive; `refused` as a schema that is not supported; else
    `bad`."""
    if job.result is None:
        return "refused" if (job.error or {}).get("code") == "invalid_request" else "bad"
    if job.result.finish_reason is FinishReason.LENGTH:
        return "endless" if "$defs" in schema else "cut"
    try:
        value = json.loads(job.result.text)
        return "valid" if jsonschema_rs.is_valid(schema, value) else "bad"
    except (ValueError, jsonschema_rs.ReferencingError):
        return "bad"


def run(client: Client, requests: Sequence[dict[str, Any]]) -> list[Job]:
    """Submits all, and waits for all."""
    ids = [client.submit(**one) for one in requests]
    return list(client.wait(ids, timeout_s=3600, must_succeed=False))


@contextmanager
def kills(stack: Stack, every_s: float) -> Iterator[list[str]]:
    """Ends a stage with SIGKILL again and again, each time `every_s` after a job has ended: a busy
    machine may need minutes to restart one. Yields the names of those killed so far."""
    killed: list[str] = []
    source = random.Random(7)

    def kill(over: Event) -> None:
        num_results = _num_results(stack)
        while not over.wait(LOOK_S):
            if _num_results(stack) == num_results or over.wait(every_s):
                continue
            processes = stack.look()["processes"]
            name = source.choice([each for each in processes if each.startswith("stage")])
            num_results = _num_results(stack)
            if is_running(processes[name]):
                os.kill(processes[name], signal.SIGKILL)
                killed.append(name)

    with meanwhile(kill):
        yield killed


def _num_results(stack: Stack) -> int:
    with psycopg.connect(stack.urls["database"]) as connection:
        ((num,),) = connection.execute("SELECT count(*) FROM results").fetchall()
    return int(num)


def compare(schemas: Sequence[Schema], calm: Sequence[Job], hurt: Sequence[Job]) -> dict[str, Any]:
    """Counts how either run ended, and the jobs that did not end alike."""
    ends = [
        [how_it_ended(*pair) for pair in zip(schemas, jobs, strict=True)] for jobs in (calm, hurt)
    ]
    pairs = list(zip(calm, hurt, strict=True))
    return {
        "calm": dict(Counter(ends[0])),
        "hurt": dict(Counter(ends[1])),
        "same": sum(_tokens(one) == _tokens(other) for one, other in pairs),
        "bad": [number for number, both in enumerate(zip(*ends, strict=True)) if "bad" in both][
            :20
        ],
        "tokens": sum(len(_tokens(job) or ()) for job in calm),
    }


def _tokens(job: Job) -> Sequence[int] | None:
    return None if job.result is None else job.result.token_ids


def measure(schemas: Sequence[Schema], kill_every_s: float, *, max_tokens: int) -> dict[str, Any]:
    """Runs both on one stack; returns the counts."""
    requests = [request(number, schema, max_tokens) for number, schema in enumerate(schemas)]
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "SHARDLINE_MODEL": str(real_model()),
            "SHARDLINE_MODEL_NAME": NAME,
            "SHARDLINE_STAGES": str(NUM_STAGES),
            "SHARDLINE_KV_MIB": str(KV_MIB),
            "SHARDLINE_MAX_CRASHES": str(MAX_CRASHES),
        }
        stack = Stack(Path(folder), **settings)
        try:
            stack.start()
            urls = stack.urls
            with Client(database_url=urls["database"], redis_url=urls["redis"]) as client:
                began_s = time.monotonic()
                calm = run(client, requests)
                calm_s = time.monotonic() - began_s
                with kills(stack, kill_every_s) as killed:
                    hurt = run(client, requests)
        finally:
            stack.end()
    counts = compare(schemas, calm, hurt)
    return {"num": len(schemas), **counts, "kills": len(killed), "calm_s": round(calm_s, 1)}


def main() -> int:
    """Prints the counts as one JSON line. Non-zero unless every text that can end is valid
    and the same; of a suite's schemas some may be refused or cut."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=500)
    parser.add_argument("--kill-every-s", type=float, default=20.0)
    parser.add_argument("--suite", type=Path)
    options = parser.parse_args()
    is_random = options.suite is None
    schemas = random_schemas(options.num) if is_random else suite_schemas(options.suite)
    max_tokens = MAX_TOKENS if is_random else SUITE_TOKENS
    found = measure(schemas, options.kill_every_s, max_tokens=max_tokens)
    print(json.dumps(found))
    allowed = {"valid", "endless"} | (set() if is_random else {"cut", "refused"})
    is_good = found["calm"] == found["hurt"] and found["calm"].keys() <= allowed
    return 0 if is_good and found["same"] == len(schemas) else 1


if __name__ == "__main__":
    sys.exit(main())
