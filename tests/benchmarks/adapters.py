"""A step whose rows have adapters beside the same step without: processor time of one core, runs
that alternate.

    python -m tests.benchmarks.adapters --folder FOLDER [--size 174m] [--dtype bfloat16] [--device
    cpu:0]

Makes model and adapters in FOLDER if they are not there. All rows have an adapter, evenly shared
out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch

from services.stage.adapters.lora import AdaptedRows, LoadedAdapter, ShardAdapters
from services.stage.adapters.peft import AdapterFolder
from services.stage.attention.paged_kv import Span
from services.stage.device.acquire import acquire
from services.stage.device.device import Device
from services.stage.engine.executor import Executor
from services.stage.engine.forward import Forward
from services.stage.engine.memory import Limits
from services.stage.kernels import kernel
from services.stage.model.model_info import ModelInfo
from services.stage.products.packing import packing_for
from shardline_scheduler.kv_blocks import BLOCK_TOKENS, blocks_for
from tests.adapters import save_adapter
from tests.benchmarks.bare_stages import log_to_stderr
from tests.benchmarks.model import SIZES, make_sized

NUM_ADAPTERS = (1, 4, 16)
RANK = 16
DECODES = 32
CONTEXT = 160
PREFILL = 512
KV_BYTES = 1 << 30
ROUNDS = 9


def parser() -> argparse.ArgumentParser:
    """Its options."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--folder", type=Path, required=True)
    options.add_argument("--size", choices=SIZES, default="174m")
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--device", default="cpu:0")
    options.add_argument("--rounds", type=int, default=ROUNDS)
    return options


def main() -> None:
    """Prints one JSON line: milliseconds to load an adapter, and of each step without any, with
    ratios for some."""
    log_to_stderr()
    options = parser().parse_args()
    model = make_sized(options.folder, options.dtype, options.size)
    folder = options.folder / f"{model.name}-adapters"
    for number in range(max(NUM_ADAPTERS)):
        if not (folder / str(number)).exists():
            save_adapter(model, folder / str(number), rank=RANK, seed=number, lora_alpha=0.1)
    with tempfile.TemporaryDirectory(prefix="shardline-adapters-") as locks, torch.inference_mode():
        device = acquire(options.device, worker="adapters", lock_folder=Path(locks))
        forward = load(model, options.dtype, device)
        loaded, load_ms = load_adapters(forward, folder)
        steps = {
            "decode": decodes(),
            "prefill": [Span(start=0, length=PREFILL, blocks=range(PREFILL // BLOCK_TOKENS))],
        }
        figures = {
            name: ratios(forward, loaded, spans, options.rounds) for name, spans in steps.items()
        }
    print(
        json.dumps(
            {"size": options.size, "dtype": options.dtype, "load_ms": round(load_ms, 1), **figures}
        )
    )


def load(model: Path, dtype: str, device: Device) -> Forward:
    """All layers of the model."""
    info = ModelInfo.read(model)
    return Executor.load(
        model=info,
        layers=range(info.num_layers),
        device=device,
        dtype=dtype,
        limits=Limits(kv_bytes=KV_BYTES, token_budget=PREFILL, max_open=DECODES),
        cache_folder=model,
    ).forward


def load_adapters(
    forward: Forward, folder: Path
) -> tuple[tuple[ShardAdapters, list[LoadedAdapter]], float]:
    """As a stage loads them; also the median of the milliseconds that each took, its checksum known
    before."""
    shard = forward.shard
    times = []
    adapters = ShardAdapters(shard, packing_for(shard.dtype, kernel.load()))
    found = AdapterFolder(folder, shard.linear_sizes, folder)
    loaded = []
    for number in range(max(NUM_ADAPTERS)):
        adapter = found.get(str(number))
        began_s = time.process_time()
        loaded.append(adapters.load(adapter))
        times.append(time.process_time() - began_s)
    return (adapters, loaded), 1000 * statistics.median(times)


def decodes() -> list[Span]:
    """Of sequences that have a context each."""
    num_blocks = blocks_for(CONTEXT + 1)
    tables = (
        range(first, first + num_blocks) for first in range(0, DECODES * num_blocks, num_blocks)
    )
    return [Span(start=CONTEXT, length=1, blocks=list(table)) for table in tables]


def ratios(
    forward: Forward,
    loaded: tuple[ShardAdapters, list[LoadedAdapter]],
    spans: Sequence[Span],
    rounds: int,
) -> Mapping[str, float]:
    """Milliseconds without adapters, and how many times that a step with some takes. Medians of
    steps that alternate, in processor time: others may use the machine."""
    times: dict[int, list[float]] = {number: [] for number in (0, *NUM_ADAPTERS)}
    for _ in range(1 + rounds):
        for number, taken in times.items():
            taken.append(step_s(forward, *loaded, spans, number))
    medians = {number: statistics.median(taken[1:]) for number, taken in times.items()}
    shown = {f"with_{number}": round(medians[number] / medians[0], 3) for number in NUM_ADAPTERS}
    return {"ms": round(1000 * medians[0], 1), **shown}


def step_s(
    forward: Forward,
    adapters: ShardAdapters,
    loaded: Sequence[LoadedAdapter],
    spans: Sequence[Span],
    number: int,
) -> float:
    """Processor seconds of a step whose rows have the first `number` adapters; each span's last row
    is sampled."""
    num_rows = sum(span.length for span in spans)
    x = forward.random_inputs(num_rows, torch.Generator().manual_seed(0))
    ends = [(num_rows // len(spans)) * (place + 1) - 1 for place in range(len(spans))]
    rows = torch.arange(num_rows)
    groups = [AdaptedRows(loaded[place], rows[place::number]) for place in range(number)]
    began_s = time.process_time()
    with forward.adapted(adapters.narrow) if groups else nullcontext(), adapters.adding(groups):
        forward.sampled_outputs(spans, x, ends)
    return time.process_time() - began_s


if __name__ == "__main__":
    main()
