"""A table classified by one SQL statement, beside the same prompts as completions of one token,
with their text and without probabilities.

    python -m tests.benchmarks.decisions [--rows 10000] [--completion-rows 10000] [--stages 1]
        [--dtype bfloat16]

Each runs on a fresh stack with the real model, so that no cache has anything of the other. Time
counts from the statement to the last end.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from sqlalchemy import Engine, text
from tenacity import retry, retry_if_result, wait_fixed

from shardline.store.connection.database import connect
from tests.benchmarks.service import stack
from tests.real_model import real_model

QUESTIONS = (
    {"type": "predicate", "name": "angry", "instructions": "The customer is angry."},
    {
        "type": "choice",
        "name": "queue",
        "instructions": "Which team should answer?",
        "choices": ["billing", "technical", "sales"],
    },
    {
        "type": "score",
        "name": "urgency",
        "instructions": "How urgent is it?",
        "levels": ["low", "normal", "high"],
    },
)
TICKETS = """
CREATE TABLE tickets AS SELECT number AS id, format(
    'Order %s: I was charged %s euros twice this month and the app closes whenever I open page %s.',
    number, number * 7 % 500, number * 13 % 97
) AS body FROM generate_series(1, :rows) AS number
"""
ASK = """
INSERT INTO jobs (model, prompt, params, metadata)
SELECT :model, tickets.body, jsonb_build_object('question', question), '{"benchmark": true}'
FROM tickets CROSS JOIN jsonb_array_elements(CAST(:questions AS jsonb)) AS question
"""
"""One statement for all rows and questions."""
COMPLETE = """
INSERT INTO jobs (model, prompt_ids, params, metadata)
SELECT :model, ARRAY(SELECT CAST(id AS int) FROM jsonb_array_elements_text(ids) AS id),
    CAST(:params AS jsonb), '{"benchmark": true}'
FROM jsonb_array_elements(CAST(:prompts AS jsonb)) AS ids
"""
GREEDY = {"max_tokens": 1, "temperature": 0}
OPEN = "SELECT count(*) FROM jobs WHERE state IN ('queued', 'running')"
ENDS = """
SELECT count(*) AS jobs, coalesce(sum(prompt_tokens), 0) AS prompt_tokens,
    coalesce(sum(cached_tokens), 0) AS cached_tokens
FROM jobs JOIN results ON results.job_id = jobs.id
WHERE state = 'succeeded' AND metadata ? 'benchmark'
"""
PROMPTS = "SELECT prompt_ids FROM jobs WHERE metadata ? 'benchmark' ORDER BY created_at, id"
POLL_S = 1.0


def main() -> None:
    """Prints both rates as one JSON line. Exits with an error if a job did not succeed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument(
        "--completion-rows", type=int, help="rows that are asked as completions too; default: all"
    )
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    folder = str(real_model())
    num_rows = min(options.rows, options.completion_rows or options.rows)
    figures: dict[str, Any] = vars(options) | {"questions": len(QUESTIONS)}
    with stack(folder, options.dtype, options.stages) as up:
        database = connect(up["urls"]["database"])
        with database.begin() as connection:
            connection.execute(text(TICKETS), {"rows": options.rows})
        asked = {"model": up["model"], "questions": json.dumps(QUESTIONS)}
        figures["decisions"] = timed(database, ASK, asked, options.rows * len(QUESTIONS))
        with database.connect() as connection:
            prompts = list(connection.execute(text(PROMPTS)).scalars())[: num_rows * len(QUESTIONS)]
        database.dispose()
    with stack(folder, options.dtype, options.stages) as up:
        database = connect(up["urls"]["database"])
        asked = {"model": up["model"], "prompts": json.dumps(prompts), "params": json.dumps(GREEDY)}
        figures["completions"] = timed(database, COMPLETE, asked, len(prompts))
        database.dispose()
    print(json.dumps(figures))


def timed(
    database: Engine, statement: str, values: dict[str, Any], num_jobs: int
) -> dict[str, float]:
    """Run a statement that inserts jobs, wait for their ends, and return jobs/s and prompt
    tokens/s."""
    began_s = time.perf_counter()
    with database.begin() as connection:
        connection.execute(text(statement), values)
    inserted_s = time.perf_counter() - began_s
    wait_for_ends(database)
    seconds = time.perf_counter() - began_s
    with database.connect() as connection:
        ends = connection.execute(text(ENDS)).one()
    assert ends.jobs == num_jobs, f"{ends.jobs} of {num_jobs} succeeded"
    return {
        "seconds": round(seconds, 1),
        "insert_seconds": round(inserted_s, 2),
        "jobs_per_s": round(num_jobs / seconds, 1),
        "prompt_tokens_per_s": round(ends.prompt_tokens / seconds),
        "cached_share": round(ends.cached_tokens / ends.prompt_tokens, 3),
    }


@retry(wait=wait_fixed(POLL_S), retry=retry_if_result(bool))
def wait_for_ends(database: Engine) -> int:
    """Return once no job is open; show how many are."""
    with database.connect() as connection:
        num_open = int(connection.execute(text(OPEN)).scalar_one())
    print(f"\r{num_open:,} jobs are open ", end="", file=sys.stderr, flush=True)
    return num_open


if __name__ == "__main__":
    main()
