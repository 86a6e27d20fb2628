"""One bf16 decode step at batch 64 and context 160 in one stage on both cores, beside a reference
executor.

    python -m tests.benchmarks.decode_step --model DIR [--reference FOLDER]

`--reference` names a folder with an `executor.py` whose `Executor(path, a, b, num_slots, max_len,
dtype)` has `step(x, slots, positions, chunks)`. Without it only our own time is printed. Also
measures the scheduler's share.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from services.stage.device.acquire import acquire
from services.stage.device.device import Device
from services.stage.engine.executor import Executor
from services.stage.engine.memory import Limits
from shardline.contract.job import FinishReason, SamplingParams
from shardline_scheduler.scheduler import Scheduler
from shardline_scheduler.scheduler_config import SchedulerConfig
from shardline_scheduler.sequence import Request
from shardline_scheduler.step_plan import StepResult, decode_plan, encode

BATCH = 64
CONTEXT = 160
STEPS = 30


class Sink:
    """Makes no text and ends nothing."""

    text = ""

    def push(self, _token: int, /) -> tuple[str, FinishReason | None]:
        """One token more."""
        return "", None

    def flush(self) -> str:
        """Nothing is held back."""
        return ""


def main() -> None:
    """Prints medians in milliseconds as one JSON line; runs alternate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--reference")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        device = acquire("cpu:0-1", worker="decode-step", lock_folder=Path(folder))
        ours = Ours(options.model, options.dtype, device)
        reference = (
            theirs(options.reference, options.model, options.dtype) if options.reference else None
        )
        figures: dict[str, list[float]] = {"ours_ms": [], "scheduler_ms": [], "reference_ms": []}
        for _ in range(options.rounds):
            steps, scheduling = ours.measure()
            figures["ours_ms"].append(steps)
            figures["scheduler_ms"].append(scheduling)
            if reference is not None:
                figures["reference_ms"].append(timed(reference))
    print(json.dumps(figures))


class Ours:
    """The executor under the real scheduler, on a full batch of decodes."""

    def __init__(self, model: str, dtype: str, device: Device) -> None:
        self._executor = Executor.load(
            model=model,
            layers=range(12),
            device=device,
            dtype=dtype,
            limits=Limits(kv_bytes=None, token_budget=512, max_open=2 * BATCH),
            cache_folder=Path(model),
        )
        self._round = 0

    def measure(self) -> tuple[float, float]:
        """Median milliseconds of a whole step, and of the scheduler and StepPlan in it, centered on
        CONTEXT."""
        scheduler = self._prefilled()
        steps = []
        scheduling = []
        for _ in range(STEPS):
            began_s = time.perf_counter()
            plan = scheduler.schedule()
            assert plan is not None
            plan = decode_plan(encode(plan))
            planned_s = time.perf_counter()
            result = self._executor.run(plan, None)
            ran_s = time.perf_counter()
            assert isinstance(result, StepResult)
            scheduler.apply(result)
            ended_s = time.perf_counter()
            steps.append(ended_s - began_s)
            scheduling.append(planned_s - began_s + ended_s - ran_s)
        return 1000 * statistics.median(steps), 1000 * statistics.median(scheduling)

    def _prefilled(self) -> Scheduler:
        self._executor.reset()
        scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=self._executor.num_blocks,
                max_seats=BATCH,
                token_budget=512,
                num_lanes=1,
                max_len=1024,
            )
        )
        params = SamplingParams(max_tokens=500, temperature=0.0, ignore_eos=True)
        for index in range(BATCH):
            prompt = tuple(
                3 + (index * 7919 + place * 104729) % 31000 for place in range(CONTEXT - STEPS // 2)
            )
            scheduler.add(
                Request(key=(str(index), 0), prompt_ids=prompt, params=params, seed=index), Sink()
            )
        while True:
            plan = scheduler.schedule()
            assert plan is not None
            result = self._executor.run(plan, None)
            assert isinstance(result, StepResult)
            scheduler.apply(result)
            if plan.num_tokens == plan.num_wanting == BATCH:
                return scheduler


def theirs(folder: str, model: str, dtype: str) -> Callable[[], None]:
    """A decode step of the reference at the same batch and context."""
    sys.path.insert(0, folder)
    module: Any = importlib.import_module("executor")
    executor = module.Executor(
        model, 0, 12, num_slots=BATCH, max_len=256, dtype=getattr(torch, dtype)
    )
    for slot in range(BATCH):
        executor.step(torch.randint(3, 31000, (CONTEXT,)), [], [], [(slot, 0, CONTEXT)], [-1])
    ids = torch.randint(3, 31000, (BATCH,))
    slots = list(range(BATCH))
    positions = [CONTEXT] * BATCH

    def step() -> None:
        executor.step(ids, slots, positions, [], None).float().argmax(-1).tolist()

    return step


def timed(step: Callable[[], None]) -> float:
    """Median milliseconds."""
    times = []
    for _ in range(STEPS):
        began_s = time.perf_counter()
        step()
        times.append(time.perf_counter() - began_s)
    return 1000 * statistics.median(times)


if __name__ == "__main__":
    main()
