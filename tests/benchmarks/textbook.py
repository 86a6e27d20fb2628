"""The textbook design as a peer: one Celery task per prompt that calls `generate`. Kept minimal on
purpose.

python -m tests.benchmarks.textbook --model DIR --dtype bfloat16
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from celery import Celery, group

from services.standalone.servers import Valkey
from tests.benchmarks.workload import NEW_TOKENS, workload

app = Celery(
    "textbook", broker=os.environ.get("TEXTBOOK_REDIS"), backend=os.environ.get("TEXTBOOK_REDIS")
)


@cache
def model() -> Any:
    """Loaded once per worker."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    path = os.environ["TEXTBOOK_MODEL"]
    dtype = getattr(torch, os.environ["TEXTBOOK_DTYPE"])
    return tf.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


@app.task(name="generate")
def generate(ids: list[int]) -> list[int]:
    """The whole design."""
    with torch.inference_mode():
        out = model().generate(
            torch.tensor([ids]),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
    return [int(token) for token in out[0, len(ids) :]]


def main() -> None:
    """Prints output tokens/s as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--prompts", type=int, default=16, help="only the first so many of W (they are alike)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardline-textbook-") as folder:
        valkey = Valkey(Path(folder))
        valkey.start()
        environment = os.environ | {
            "TEXTBOOK_REDIS": valkey.url,
            "TEXTBOOK_MODEL": options.model,
            "TEXTBOOK_DTYPE": options.dtype,
        }
        argv = [
            sys.executable,
            "-m",
            "celery",
            "-A",
            "tests.benchmarks.textbook",
            "worker",
            "--pool=solo",
            "-l",
            "ERROR",
        ]
        worker = subprocess.Popen(argv, env=environment, stdout=subprocess.DEVNULL)
        try:
            app.conf.update(broker_url=valkey.url, result_backend=valkey.url)
            print(json.dumps({"tokens_per_s": [run(options.prompts)]}))
        finally:
            worker.terminate()
            worker.wait()
            valkey.kill()


def run(num_prompts: int) -> float:
    """Output tokens/s, after a first task that loads the model."""
    prompts = workload().prompts[:num_prompts]
    generate.delay(list(prompts[0])).get(timeout=600)
    began_s = time.perf_counter()
    group(generate.s(list(prompt)) for prompt in prompts).apply_async().get(timeout=1800)
    return num_prompts * NEW_TOKENS / (time.perf_counter() - began_s)


if __name__ == "__main__":
    main()
