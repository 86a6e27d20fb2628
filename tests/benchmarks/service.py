"""The whole service on W: `submit_many`, clock from the first INSERT to the last result row. Flower
stands still.

python -m tests.benchmarks.service --model DIR --dtype bfloat16 --stages 2
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from tenacity import retry, retry_if_result, stop_after_delay, wait_fixed

from services.standalone.state_dir import StateDir
from shardline.client import Client
from tests.benchmarks.workload import PARAMS, WARM_UP_PROMPTS, Workload, workload

READY_S = 180.0


def main() -> None:
    """Prints output tokens/s of each run as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    with (
        stack(options.model, options.dtype, options.stages) as up,
        Client(database_url=up["urls"]["database"], redis_url=up["urls"]["redis"]) as client,
    ):
        run(client, up["model"], workload(WARM_UP_PROMPTS))
        speeds = [
            run(client, up["model"], workload(options.prompts, run=1 + each))
            for each in range(options.runs)
        ]
    print(json.dumps({"tokens_per_s": speeds}))


@contextmanager
def stack(model: str, dtype: str, stages: int, **settings: str) -> Iterator[dict[str, Any]]:
    """A stack of its own, ready; its up.json, and its folder as `home`."""
    with tempfile.TemporaryDirectory(prefix="shardline-bench-") as folder:
        environment = os.environ | {
            "SHARDLINE_HOME": folder,
            "SHARDLINE_HTTP_PORT": "0",
            "SHARDLINE_FLOWER_PORT": "0",
            "SHARDLINE_MODEL": model,
            "SHARDLINE_DTYPE": dtype,
            "SHARDLINE_STAGES": str(stages),
            **settings,
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "services.standalone", "up"],
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        try:
            up = _published(StateDir(Path(folder)), process)
            os.kill(up["processes"]["flower"], signal.SIGSTOP)
            yield {**up, "home": folder}
            os.kill(up["processes"]["flower"], signal.SIGCONT)
        finally:
            process.terminate()
            process.wait()


def run(client: Client, model: str, work: Workload) -> float:
    """Output tokens/s of one workload."""
    params = msgspec.to_builtins(PARAMS)
    requests = [{"model": model, "prompt": prompt, **params} for prompt in work.prompts]
    began_s = time.perf_counter()
    client.wait(client.submit_many(requests), timeout_s=600)
    return work.num_output_tokens / (time.perf_counter() - began_s)


@retry(
    wait=wait_fixed(0.1),
    stop=stop_after_delay(READY_S),
    retry=retry_if_result(lambda up: up is None),
)
def _published(home: StateDir, process: subprocess.Popen[bytes]) -> Any:
    if process.poll() is not None:
        raise RuntimeError("the stack did not start")
    return home.published()


if __name__ == "__main__":
    main()
