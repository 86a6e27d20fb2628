"""Streamed layers: the same steps with all weights in memory and with as many streamed as a limit
asks for, and what the planner predicts of these by the device's profile.

    python -m tests.benchmarks.streaming --model DIR --memory-mib 900 [--dtype bfloat16] [--device
    cpu:0-1]

Run it under a limit of the machine's own (a cgroup's) to see that the limit is kept: it prints the
peak of its memory while layers are streamed.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from services.stage.attention.paged_kv import Span
from services.stage.device.acquire import acquire
from services.stage.device.device import Device
from services.stage.engine.executor import Executor
from services.stage.engine.forward import Forward
from services.stage.engine.memory import Limits
from services.stage.fleet.profiling import profile
from services.stage.model.model_info import ModelInfo
from services.stage.settings import StageSettings
from services.stage.streaming.streamed_layers import measure, store_of
from shardline_costs import ModelCosts
from shardline_costs.model_costs import KV_BYTES as KV_BYTES_OF
from shardline_costs.step_cost import stage_cost
from shardline_costs.workload import StepKind
from tests.benchmarks.bare_stages import log_to_stderr

ROWS = (1, 16, 64, 256)
"""Of a step, each of a sequence of its own: a larger one has more work for each reading of the
weights."""
RUNS = 3
KV_BYTES = 32 << 20


def parser() -> argparse.ArgumentParser:
    """Its options."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--model", type=Path, required=True)
    options.add_argument(
        "--memory-mib",
        type=int,
        required=True,
        help="for weights and KV, while layers are streamed",
    )
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--device", default="cpu:0-1")
    options.add_argument("--only-streamed", action="store_true", help="not the model in memory")
    return options


def main() -> None:
    """Prints one JSON line for each way: seconds of a step by rows, and output tokens/s."""
    log_to_stderr()
    options = parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="shardline-streaming-") as folder:
        device = acquire(options.device, worker="streaming", lock_folder=Path(folder) / "locks")
        limits = Limits(
            kv_bytes=KV_BYTES,
            memory_bytes=options.memory_mib << 20,
            streamed_layers="auto",
            streamed_folder=Path(folder),
            token_budget=max(ROWS),
            max_open=max(ROWS),
        )
        executor = load(options, limits, device)
        streamed = len(executor.forward.shard.streamed_layers)
        rate = measure(store_of(device.uploads(), Path(folder)), device.synchronize) / 1e9
        print(
            json.dumps(
                {
                    "streamed_layers": streamed,
                    "read_gb_per_s": round(rate, 2),
                    **steps(executor.forward),
                }
            )
        )
        print(json.dumps({"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10}))
        if not options.only_streamed:
            del executor
            whole = Limits(kv_bytes=KV_BYTES, token_budget=max(ROWS), max_open=max(ROWS))
            print(json.dumps({"streamed_layers": 0, **steps(load(options, whole, device).forward)}))
            print(json.dumps(predicted(options, Path(folder), device)))


def load(options: argparse.Namespace, limits: Limits, device: Device) -> Executor:
    """All layers of the model."""
    info = ModelInfo.read(options.model)
    return Executor.load(
        model=info,
        layers=range(info.num_layers),
        device=device,
        dtype=options.dtype,
        limits=limits,
        cache_folder=options.model,
    )


def predicted(options: argparse.Namespace, folder: Path, device: Device) -> dict[str, Any]:
    """The same steps as the planner sees them, with the same memory and KV."""
    settings = StageSettings(
        model=str(options.model),
        dtype=options.dtype,
        token_budget=max(ROWS),
        memory_mib=options.memory_mib,
        streamed_layers="auto",
        streamed_layers_dir=folder,
        cache_dir=folder,
        run_dir=folder,
    )
    measured = profile(settings, device, fresh=True, together=False)
    model = ModelCosts.read(options.model)
    kv_tokens = KV_BYTES // sum(
        kind.kv_numbers * KV_BYTES_OF[options.dtype] for kind in model.layers
    )
    kinds = {rows: StepKind(count=1, decodes=rows, decode_context=rows) for rows in ROWS}
    costs = {rows: stage_cost(measured, model, [kind], kv_tokens) for rows, kind in kinds.items()}
    return {
        "read_gb_per_s": round(measured.stream_bytes_per_s / 1e9, 2),
        "predicted_streamed_mib": round(costs[max(ROWS)].streamed(0, len(model.layers))) >> 20,
        "predicted_step_s": {
            rows: round(cost.stage(0, len(model.layers)), 3) for rows, cost in costs.items()
        },
    }


def steps(forward: Forward) -> dict[str, dict[int, float]]:
    """Of decodes without context."""
    times = {rows: step_s(forward, rows) for rows in ROWS}
    return {
        "step_s": {rows: round(seconds, 3) for rows, seconds in times.items()},
        "tokens_per_s": {rows: round(rows / seconds, 1) for rows, seconds in times.items()},
    }


def step_s(forward: Forward, rows: int) -> float:
    """The median of some, after one that does not count."""
    spans = [
        Span(start=0, length=1, blocks=[index % forward.kv.num_blocks]) for index in range(rows)
    ]
    x = forward.random_inputs(rows, torch.Generator().manual_seed(0))
    times = []
    with torch.inference_mode():
        for _ in range(1 + RUNS):
            began_s = time.perf_counter()
            forward.sampled_outputs(spans, x, list(range(rows)))
            times.append(time.perf_counter() - began_s)
    return statistics.median(times[1:])


if __name__ == "__main__":
    main()
