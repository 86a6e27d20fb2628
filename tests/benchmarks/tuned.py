"""Tuned settings beside the default ones on the bare engine, in turns: does what the simulator
promises hold?

    python -m tests.benchmarks.tuned [--prompts 128] [--rounds 5] [--trials 60] [--device cpu:0
    --device cpu:1]

Devices are measured with steps of up to 1,024 rows, `shardline tune` searches seats, token budget,
lanes and split for the prompts of workload W, all at once, and both settings run on the same
devices, one after the other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from shardline.contract.fleet.split import even_split
from shardline_costs import ModelCosts
from shardline_fleet.simulator.fleet_file import FleetFile
from shardline_fleet.simulator.tuning import Candidate, Setting, Trial, Tuner, TuningGoal
from tests.benchmarks import model as bench_model
from tests.benchmarks import unequal
from tests.benchmarks.unequal import Mix, Worker
from tests.benchmarks.workload import NEW_TOKENS, workload

MEASURED_ROWS = 1024
NO_BOUND_S = 1e6
"""Prompts that come all at once are asked for throughput alone."""
OPTIONS = {
    Setting.SEATS: "--seats",
    Setting.TOKEN_BUDGET: "--token-budget",
    Setting.LANES: "--lanes",
    Setting.SPLIT: "--split",
}
"""Of the bare engine."""


def main() -> None:
    """Prints what was found, a line of JSON for each round, and the median ratio."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--prompts", type=int, default=128)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--trials", type=int, default=60)
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument(
        "--device", action="append", help="one for each stage; default: cpu:0 cpu:1"
    )
    options.add_argument("--model", type=Path, help="default: the model of `make bench`")
    given = options.parse_args()
    path = given.model or bench_model.make(Path.home() / ".cache" / "shardline-bench", "bfloat16")
    workers = [
        Worker(device=device, dtype=given.dtype, environment=rows())
        for device in given.device or ("cpu:0", "cpu:1")
    ]
    default, best, gain = search(path, workers, given)
    promised = {"default": speed_of(default), "tuned": speed_of(best)}
    print(json.dumps({"settings": dict(best.candidate), "simulated": promised}), flush=True)
    sides = {"default": default.candidate, "tuned": best.candidate}
    ratios = []
    for number in range(given.rounds):
        speeds = {}
        for side in [*sides][:: 1 if number % 2 == 0 else -1]:
            speeds[side] = run(path, workers, sides[side], given.prompts)
        ratios.append(speeds["tuned"] / speeds["default"])
        print(json.dumps({**speeds, "ratio": round(ratios[-1], 3)}), flush=True)
    print(
        json.dumps(
            {"median_ratio": round(statistics.median(ratios), 3), "simulated_ratio": round(gain, 3)}
        )
    )


def rows() -> tuple[tuple[str, str], ...]:
    """So that devices are timed with larger steps than the default ones too."""
    return (("SHARDLINE_TOKEN_BUDGET", str(MEASURED_ROWS)),)


def search(
    path: Path, workers: Sequence[Worker], options: argparse.Namespace
) -> tuple[Trial, Trial, float]:
    """The default settings, those that the tuner takes for these devices, of which each has a
    stage, and their gain."""
    profiles = unequal.measure(Mix(workers=tuple(workers)), path)
    layers = even_split(len(ModelCosts.read(path).layers), len(workers))
    with tempfile.TemporaryDirectory(prefix="shardline-tuned-") as name:
        folder = Path(name)
        for place, profile in enumerate(profiles):
            (folder / f"{place}.json").write_bytes(msgspec.json.encode(profile))
        jobs = [f"0,{len(prompt)},{NEW_TOKENS}" for prompt in workload(options.prompts).prompts]
        (folder / "jobs.csv").write_text("\n".join(["at_s,prompt,output", *jobs, ""]))
        text = {
            "model": str(path.resolve()),
            "cells": [{"devices": {f"{place}.json": 1 for place in range(len(workers))}}],
            "load": {
                "scenario": "trace",
                "trace": "jobs.csv",
                "ttft_s": NO_BOUND_S,
                "token_s": NO_BOUND_S,
            },
            "split": ",".join(f"{part.start}-{part.stop - 1}" for part in layers),
        }
        fleet = msgspec.convert(text, FleetFile)
        tuner = Tuner(fleet, folder, TuningGoal.TOKENS_PER_S)
        return tuner.run(options.trials, lambda _number, _trial: None)


def speed_of(trial: Trial) -> float:
    """Output tokens/s, simulated."""
    assert trial.outcome is not None
    return round(trial.outcome.tokens_per_s, 1)


def run(path: Path, workers: Sequence[Worker], candidate: Candidate, num_prompts: int) -> float:
    """Output tokens/s of the bare engine with these settings."""
    argv = [
        sys.executable,
        "-m",
        "tests.benchmarks.bare",
        "--model",
        str(path),
        "--prompts",
        str(num_prompts),
    ]
    argv += ["--runs", "1", "--prompt-lookup", "0"]
    for worker in workers:
        argv += ["--device", worker.device, "--dtype", worker.dtype]
    for setting, option in OPTIONS.items():
        value = candidate[setting]
        argv += [option, str(value)] if value is not None else []
    environment = unequal.environment(Worker(device=workers[0].device))
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
    (speed,) = json.loads(done.stdout)["tokens_per_s"]
    return float(speed)


if __name__ == "__main__":
    main()
