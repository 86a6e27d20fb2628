"""Ranks of a core each beside one process of as many threads, and one on one core: milliseconds of
a step.

    python -m tests.benchmarks.ranks [--model DIR] [--dtype bfloat16] [--cores 0-1] [--rounds 5]

Each shape is a process that holds the whole model. They take turns in every round, so that whoever
else uses the machine disturbs all. Prints a line for each kind of step: the medians, and the ranks'
speed as a ratio to the threads'.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch

from services.stage.attention.attention import BLOCK_TOKENS, Span
from services.stage.device.acquire import acquire
from services.stage.engine.executor import Executor
from services.stage.engine.forward import Forward
from services.stage.engine.memory import Limits
from services.stage.model.model_info import ModelInfo
from shardline.base.rounding import ceil_div
from shardline_server.host.cores import parse_cores, show_cores
from tests.benchmarks import model as bench_model
from tests.benchmarks.bare_stages import log_to_stderr

CONTEXT = 160
DECODES = (1, 8, 64, 256)
PREFILL = 256
RUNS = 9


class Shape(NamedTuple):
    """How a stage uses cores."""

    device: str
    num_ranks: int


def main() -> None:
    """Loads all shapes, then lets them take turns."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--model", type=Path, help="default: the model of `make bench`")
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--cores", default="0-1", help="divided among the ranks")
    options.add_argument("--rounds", type=int, default=5)
    given = options.parse_args()
    cores = parse_cores(f"cpu:{given.cores}")
    first = f"cpu:{cores[0]}"
    both = f"cpu:{show_cores(cores)}"
    shapes = {
        "one core": Shape(first, 1),
        "threads": Shape(both, 1),
        "ranks": Shape(both, len(cores)),
    }
    folder = given.model or bench_model.make(
        Path.home() / ".cache" / "shardline-bench", given.dtype
    )
    with ExitStack() as stack:
        locks = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        links = {
            name: stack.enter_context(started(folder, given.dtype, shape, locks))
            for name, shape in shapes.items()
        }
        rounds = [{name: turn(link) for name, link in links.items()} for _ in range(given.rounds)]
    for step in rounds[0]["ranks"]:
        ms = {name: statistics.median(times[name][step] for times in rounds) for name in shapes}
        shown = {f"{name}_ms": round(each, 2) for name, each in ms.items()}
        print(
            json.dumps(
                {"step": step, **shown, "speed_of_ranks": round(ms["threads"] / ms["ranks"], 3)}
            )
        )


def started(folder: Path, dtype: str, shape: Shape, locks: Path) -> Connection:
    """The link to a process that holds the model; it ends with the link."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    spawn.Process(target=serve, args=(theirs, folder, dtype, shape, locks), daemon=True).start()
    theirs.close()
    ours.recv()
    return ours


def turn(link: Connection) -> dict[str, float]:
    """Milliseconds of each kind of step."""
    link.send(None)
    times: dict[str, float] = link.recv()
    return times


def serve(link: Connection, folder: Path, dtype: str, shape: Shape, locks: Path) -> None:
    """Measures at every message until the link is closed."""
    log_to_stderr()
    taken = acquire(
        shape.device, worker=str(shape), lock_folder=locks, shared=True, num_ranks=shape.num_ranks
    )
    info = ModelInfo.read(folder)
    num_tokens = max(DECODES) * ceil_div(CONTEXT + 1, BLOCK_TOKENS) * BLOCK_TOKENS
    executor = Executor.load(
        model=info,
        layers=range(info.num_layers),
        device=taken,
        dtype=dtype,
        limits=Limits(
            kv_bytes=num_tokens * kv_bytes_per_token(info),
            token_budget=PREFILL,
            max_open=max(DECODES),
        ),
        cache_folder=folder,
    )
    link.send(None)
    try:
        while True:
            link.recv()
            link.send(measured(executor.forward))
    except EOFError:
        taken.release()


def kv_bytes_per_token(info: ModelInfo) -> int:
    """Of all layers, in float32: no KV is wider."""
    config = info.config
    return (
        2
        * 4
        * info.num_layers
        * config.num_key_value_heads
        * config.hidden_size
        // config.num_attention_heads
    )


@torch.inference_mode()
def measured(forward: Forward) -> dict[str, float]:
    """Milliseconds of each kind of step."""
    width = ceil_div(CONTEXT + 1, BLOCK_TOKENS)
    found = {}
    for num in DECODES:
        spans = [
            Span(start=CONTEXT, length=1, blocks=list(range(place * width, (place + 1) * width)))
            for place in range(num)
        ]
        found[f"{num} decodes"] = median_ms(forward, spans, list(range(num)))
    prompt = Span(start=0, length=PREFILL, blocks=list(range(ceil_div(PREFILL, BLOCK_TOKENS))))
    found[f"prefill of {PREFILL}"] = median_ms(forward, [prompt], [PREFILL - 1])
    return found


def median_ms(forward: Forward, spans: list[Span], rows: list[int]) -> float:
    """Of some runs, after one that does not count."""
    x = forward.random_inputs(sum(span.length for span in spans), torch.Generator().manual_seed(0))
    run = partial(forward.sampled_outputs, spans, x, rows)
    run()
    times = []
    for _ in range(RUNS):
        began_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - began_s)
    return 1e3 * statistics.median(times)


if __name__ == "__main__":
    main()
