"""A worker joins a fleet under load: how long until the new plan, and until all of its stages
serve.

    python -m tests.benchmarks.fleet [--time-scale 1]

The fleet has two workers, which hold the demo model only together; its plan is older than the
cool-down, so that the third gets a stage of a new cut at once.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

from services.standalone.cores import usable_cores
from shardline.base.clock import monotonic_s
from shardline.base.config import Times
from shardline.client import Client
from shardline.store.connection.database import connect
from shardline.store.fleets import COOL_DOWN_POLLS
from tests.fleet import keep_busy, layers, plan, start_third
from tests.polling import until
from tests.stack import Stack

MEMORY_MIB = 21
"""Of each worker: less than the model and the KV of several jobs."""
PROMPTS = [f"sort: {number}, 7, 2 =" for number in range(8)]
PARAMS = {"max_tokens": 200, "temperature": 0, "ignore_eos": True}
PATIENCE_S = 300.0


def main() -> None:
    """Prints one JSON line, in seconds from the start of the third worker's process."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--time-scale", type=float, default=1.0, help="of the protocol's times")
    given = options.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="shardline-fleet-") as folder,
        fleet(Path(folder), given.time_scale) as stack,
    ):
        print(json.dumps(join(stack, given.time_scale)))


@contextmanager
def fleet(folder: Path, time_scale: float) -> Iterator[Stack]:
    """Two workers, ready."""
    settings = {
        "WORKERS": 2,
        "STAGE_CORES": len(usable_cores()),
        "MEMORY_MIB": MEMORY_MIB,
        "TIME_SCALE": time_scale,
        "CACHE_DIR": folder / "cache",
    }
    stack = Stack(folder, **{f"SHARDLINE_{name}": str(value) for name, value in settings.items()})
    stack.start()
    try:
        yield stack
    finally:
        stack.end()


def join(stack: Stack, time_scale: float) -> dict[str, object]:
    """Starts the third worker and looks at plans and pipelines until the new cut serves and every
    job has ended."""
    database = connect(stack.urls["database"])
    cool_down_s = COOL_DOWN_POLLS * Times().scaled(time_scale).poll_s
    until(lambda: plan(database).age_s > cool_down_s, timeout_s=PATIENCE_S)
    before = plan(database)
    with Client(database_url=stack.urls["database"], redis_url=stack.urls["redis"]) as client:
        ids: list[UUID] = []

        def is_serving() -> bool:
            ids.extend(keep_busy(database, client, PROMPTS, PARAMS))
            return set(layers(database)) == set(plan(database).split)

        until(lambda: is_serving() and ids, timeout_s=PATIENCE_S)
        began_s = monotonic_s()
        worker = start_third(stack)
        try:
            planned_s = seconds(began_s, lambda: plan(database).split != before.split)
            serving_s = seconds(began_s, is_serving)
            after = plan(database)
            num_done = sum(job.result is not None for job in client.wait(ids, PATIENCE_S))
        finally:
            worker.terminate()
            worker.wait()
    database.dispose()
    return {
        "split_before": before.split,
        "split_after": after.split,
        "planned_s": round(planned_s, 2),
        "serving_s": round(serving_s, 2),
        "jobs": len(ids),
        "succeeded": num_done,
    }


def seconds(began_s: float, condition: Callable[[], bool]) -> float:
    """From then until the condition holds."""
    until(condition, timeout_s=PATIENCE_S)
    return monotonic_s() - began_s


if __name__ == "__main__":
    main()
