"""Unequal devices: the planned split beside the even one and every other, predicted and measured
with the bare engine.

    python -m tests.benchmarks.unequal [--mix isa --mix busy --mix int8] [--prompts 32] [--runs 1]

Each mix makes two stages of this machine:

- isa: one core computes with AVX2 only;
- busy: one core has another process on it, which takes its half;
- int8: one core has weights of int8;
- isa-int8: one core has weights of int8, the other computes with AVX2 only;
- far: the two are alike, but every frame between them takes 40 ms, through a proxy;
- equal: none, the two are alike, as `make up` finds them.

Devices are measured side by side, as `make up` does. Then every split of the model runs, in both
orders.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from services.stage.fleet.peer import measure_link
from services.stage.fleet.peer_server import PeerServer
from services.stage.hop.sockets import Sockets
from services.standalone.measuring import Measuring
from services.standalone.preload import mimalloc
from shardline_costs import DeviceProfile, ModelCosts, Workload
from shardline_costs.prediction import Predictor, StageAssignment
from shardline_fleet.planner import make_plans
from shardline_fleet.planner.fleet import share_memory
from tests.benchmarks import model as bench_model
from tests.benchmarks.bare_stages import delayed
from tests.benchmarks.workload import NEW_TOKENS, workload

BASE = {"OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A device as one stage has it."""

    device: str
    dtype: str = "bfloat16"
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Workers side by side, mostly two unlike ones."""

    workers: tuple[Worker, ...]
    busy_core: int | None = None
    delay_s: float = 0.0
    """Of every frame."""


AVX2 = (("ONEDNN_MAX_CPU_ISA", "AVX2"),)
MIXES = {
    "isa": Mix(workers=(Worker(device="cpu:0"), Worker(device="cpu:1", environment=AVX2))),
    "busy": Mix(workers=(Worker(device="cpu:0"), Worker(device="cpu:1")), busy_core=1),
    "int8": Mix(workers=(Worker(device="cpu:0", dtype="int8"), Worker(device="cpu:1"))),
    "isa-int8": Mix(
        workers=(Worker(device="cpu:0", dtype="int8"), Worker(device="cpu:1", environment=AVX2))
    ),
    "far": Mix(workers=(Worker(device="cpu:0"), Worker(device="cpu:1")), delay_s=0.04),
    "equal": Mix(workers=(Worker(device="cpu:0"), Worker(device="cpu:1"))),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One split in one order."""

    devices: tuple[str, ...]
    split: str
    predicted: float
    measured: float
    is_planned: bool = False
    is_even: bool = False

    @property
    def error(self) -> float:
        """Of the prediction."""
        return self.predicted / self.measured - 1

    def __str__(self) -> str:
        speeds = (
            f"predicted {self.predicted:6.1f}, measured {self.measured:6.1f} tokens/s,"
            f" {self.error:+.0%}"
        )
        marks = f"{'planned ' * self.is_planned}{'even' * self.is_even}"
        return f"{' '.join(self.devices)} {self.split:>10}: {speeds} {marks}"


def main() -> None:
    """Prints a line for each split, then what the plan reached."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--mix", action="append", choices=MIXES, help="default: all")
    options.add_argument("--prompts", type=int, default=32)
    options.add_argument("--runs", type=int, default=1, help="of each split; the median counts")
    options.add_argument("--model", type=Path, help="default: the model of `make bench`")
    given = options.parse_args()
    path = given.model or bench_model.make(Path.home() / ".cache" / "shardline-bench", "bfloat16")
    for name in given.mix or MIXES:
        with neighbor(MIXES[name].busy_core):
            rows = compare(MIXES[name], path, given)
        print(json.dumps({"mix": name, **summary(rows)}), flush=True)


def compare(mix: Mix, path: Path, options: argparse.Namespace) -> list[Row]:
    """Measures, plans, and runs every split."""
    measured = apart(measure(mix, path), mix.delay_s)
    profiles = share_memory(measured)
    model = ModelCosts.read(path)
    lengths = [len(prompt) for prompt in workload(options.prompts).prompts]
    load = Workload(
        prompt=round(statistics.mean(lengths)),
        output=NEW_TOKENS,
        concurrency=options.prompts,
        at_once=True,
    )
    best = make_plans(model, measured, load, num_stages=2, replicas=1).best.pipelines[0]
    predictor = Predictor(model, load)
    rows = []
    for order in ((0, 1), (1, 0)):
        for bound in range(1, len(model.layers)):
            ranges = ((0, bound), (bound, len(model.layers)))
            stages = [
                StageAssignment((profiles[place],), *part)
                for place, part in zip(order, ranges, strict=True)
            ]
            plan = predictor.predict(stages)
            workers = mix.workers[order[0]], mix.workers[order[1]]
            row = Row(
                devices=tuple(worker.device for worker in workers),
                split=plan.split,
                predicted=plan.tokens_per_s,
                measured=run(replace(mix, workers=workers), plan.split, path, options),
                is_planned=plan.stages == best.stages,
                is_even=order == (0, 1) and 2 * bound == len(model.layers),
            )
            rows.append(row)
            print(row, flush=True)
    return rows


def measure(mix: Mix, path: Path) -> list[DeviceProfile]:
    """The profiles of both workers, measured at the same time."""
    with tempfile.TemporaryDirectory(prefix="shardline-unequal-") as folder:
        own = {
            "SHARDLINE_MODEL": str(path),
            "SHARDLINE_LOCK_DIR": folder,
            "SHARDLINE_CACHE_DIR": folder,
        }
        environments = [
            {
                **environment(worker),
                **own,
                "SHARDLINE_DEVICE": worker.device,
                "SHARDLINE_DTYPE": worker.dtype,
            }
            for worker in mix.workers
        ]
        measuring = Measuring(environments, Path(folder))
        try:
            return measuring.profiles()
        finally:
            measuring.end()


def apart(profiles: Sequence[DeviceProfile], delay_s: float) -> list[DeviceProfile]:
    """On two machines, with the link between them as a fleet's workers measure it, if frames are
    delayed."""
    if not delay_s:
        return list(profiles)
    sockets = Sockets(bind="tcp://127.0.0.1")
    server = PeerServer(sockets, {})
    server.start()
    link = measure_link(sockets, delayed(server.address, delay_s))
    server.stop()
    links = {each.device: link for each in profiles}
    return [msgspec.structs.replace(each, machine=each.device, links=links) for each in profiles]


def run(mix: Mix, split: str, path: Path, options: argparse.Namespace) -> float:
    """Output tokens/s of the bare engine with these workers in order."""
    workers = mix.workers
    argv = [sys.executable, "-m", "tests.benchmarks.bare", "--model", str(path), "--split", split]
    argv += [
        "--prompts",
        str(options.prompts),
        "--seats",
        str(options.prompts),
        "--runs",
        str(options.runs),
    ]
    argv += [
        "--prompt-lookup",
        "0",
        "--hop-delay-ms",
        str(mix.delay_s * 1e3),
        *stage_options(workers),
    ]
    done = subprocess.run(
        argv, env=environment(workers[0]), capture_output=True, text=True, check=True
    )
    return statistics.median(json.loads(done.stdout)["tokens_per_s"])


def stage_options(workers: Sequence[Worker]) -> list[str]:
    """Of the bare engine, whose own process has the environment of the first."""
    options = []
    for place, worker in enumerate(workers):
        options += ["--device", worker.device, "--dtype", worker.dtype]
        own = {**dict.fromkeys(dict(workers[0].environment), ""), **dict(worker.environment)}
        options += [f"--env={place}:{name}={value}" for name, value in own.items()] if place else []
    return options


def environment(worker: Worker) -> dict[str, str]:
    """Of a worker's process."""
    return {**os.environ, **BASE, "LD_PRELOAD": mimalloc(), **dict(worker.environment)}


@contextmanager
def neighbor(core: int | None) -> Iterator[None]:
    """While entered, a process computes on this core without a pause."""
    with ExitStack() as stack:
        if core is not None:
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(busy.wait)
            stack.callback(busy.kill)
            os.sched_setaffinity(busy.pid, {core})
        yield


def summary(rows: Sequence[Row]) -> dict[str, object]:
    """What the plan reached, in tokens/s and as ratios, and how far predictions are off."""
    planned = next(row for row in rows if row.is_planned)
    even = next(row for row in rows if row.is_even)
    best = max(rows, key=lambda row: row.measured)
    return {
        "planned": msgspec.to_builtins(planned),
        "of_even": round(planned.measured / even.measured, 3),
        "of_best": round(planned.measured / best.measured, 3),
        "best": best.split,
        "error_of_plan": round(planned.error, 3),
        "median_error": round(statistics.median(abs(row.error) for row in rows), 3),
        "largest_error": round(max(abs(row.error) for row in rows), 3),
    }


if __name__ == "__main__":
    main()
