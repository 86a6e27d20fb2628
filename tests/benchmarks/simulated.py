"""The simulator beside the bare engine: tokens/s of a batch, time to the first token, and a request
alone.

    python -m tests.benchmarks.simulated [--prompts 64] [--rounds 3] [--model DIR]
    [--parts-of-cores] [--recovery]

One stage on a core, one on both, two with a core each. With --parts-of-cores: three stages, of a
core and of two parts of the other, and four, of two parts of each (`core_share`). Devices are
measured before each run, since whoever else uses the machine makes them slower: compare the two
numbers of one run, and read the median of the errors. With --recovery: how long the death of a tail
with a spare holds jobs up, in a whole stack of the demo model, or of another in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from services.standalone.settings import CLERK
from shardline.contract.fleet.split import even_split
from shardline_costs import DeviceProfile, ModelCosts
from shardline_costs.prediction import StageAssignment
from shardline_fleet.planner.fleet import share_memory
from shardline_fleet.simulator.agenda import Agenda
from shardline_fleet.simulator.cell import FORM_S
from shardline_fleet.simulator.simulated_head import HeadCalls, SimulatedHead
from shardline_fleet.simulator.simulated_job import SimulatedJob
from shardline_fleet.simulator.stage_chain import StageChain
from shardline_fleet.simulator.tally import Tally
from shardline_scheduler.events import NewTokens
from shardline_scheduler.scheduler_config import SchedulerConfig
from tests.benchmarks import bare, unequal
from tests.benchmarks import model as bench_model
from tests.benchmarks.bare_stages import log_to_stderr
from tests.benchmarks.core_share import share_of_core
from tests.benchmarks.recovery import MAX_TOKENS, PROMPTS, TOKENS_BEFORE
from tests.benchmarks.unequal import Mix, Worker
from tests.benchmarks.workload import NEW_TOKENS, WARM_UP_PROMPTS, Workload, workload

WHOLE = 1.0
PART = 0.5
Placement = Sequence[tuple[str, float]]
"""The device of each stage, and its share of it."""
PLACEMENTS: Sequence[Placement] = (
    (("cpu:0", WHOLE),),
    (("cpu:0-1", WHOLE),),
    (("cpu:0", WHOLE), ("cpu:1", WHOLE)),
)
PARTS: Sequence[Placement] = (
    (("cpu:0", WHOLE), *(("cpu:1", PART),) * 2),
    (*(("cpu:0", PART),) * 2, *(("cpu:1", PART),) * 2),
)
MAX_BLOCKS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one placement, measured or simulated."""

    tokens_per_s: float
    """Of all prompts at once."""
    ttft_s: float
    """The median of them."""
    alone_ttft_s: float
    alone_s: float
    """A whole request alone."""


def main() -> None:
    """Prints a line of JSON for each placement and round, then the median errors."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--prompts", type=int, default=64)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--model", type=Path, help="default: the model of `make bench`")
    options.add_argument(
        "--parts-of-cores", action="store_true", help="instead: three and four stages; needs root"
    )
    options.add_argument(
        "--recovery", action="store_true", help="instead: a tail is killed that has a spare"
    )
    options.add_argument("--measure", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.measure:
        log_to_stderr()
        print(json.dumps(measured(bare.parser().parse_args(given.measure))))
        return
    path = given.model or bench_model.make(Path.home() / ".cache" / "shardline-bench", "bfloat16")
    if given.recovery:
        path, dtype = (given.model, "bfloat16") if given.model else (CLERK, "float32")
        print(json.dumps(recovery(path, dtype, given.rounds)))
        return
    errors: dict[str, list[float]] = {}
    for _ in range(given.rounds):
        for placement in PARTS if given.parts_of_cores else PLACEMENTS:
            with ExitStack() as groups:
                workers = [worker_of(device, share, groups) for device, share in placement]
                for name, (predicted, real) in compare(path, workers, given.prompts).items():
                    errors.setdefault(name, []).append(predicted / real - 1)
    medians = {name: round(statistics.median(each), 3) for name, each in errors.items()}
    print(json.dumps({"median_errors": medians}))


def worker_of(device: str, share: float, groups: ExitStack) -> Worker:
    """With so much of a device, until the stack is closed."""
    return Worker(
        device=device,
        environment=groups.enter_context(share_of_core(share)) if share < WHOLE else (),
    )


def compare(
    path: Path, workers: Sequence[Worker], num_prompts: int
) -> dict[str, tuple[float, float]]:
    """Each figure as it was simulated and measured, by its name."""
    profiles = unequal.measure(Mix(workers=tuple(workers)), path)
    model = ModelCosts.read(path)
    argv = [sys.executable, "-m", "tests.benchmarks.simulated", "--measure", "--model", str(path)]
    argv += ["--prompts", str(num_prompts), "--seats", str(num_prompts), "--prompt-lookup", "0"]
    argv += unequal.stage_options(workers)
    done = subprocess.run(
        argv, env=unequal.environment(workers[0]), stdout=subprocess.PIPE, text=True, check=True
    )
    real = Figures(**json.loads(done.stdout))
    predicted = simulated(model, assigned(model, profiles), workload(num_prompts, run=1))
    devices = [worker.device for worker in workers]
    found = {}
    for name in Figures.__slots__:
        pair = getattr(predicted, name), getattr(real, name)
        found[f"{' '.join(devices)}: {name}"] = pair
        print(
            json.dumps(
                {"devices": devices, "figure": name, "simulated": pair[0], "measured": pair[1]}
            ),
            flush=True,
        )
    return found


def assigned(model: ModelCosts, profiles: Sequence[DeviceProfile]) -> list[StageAssignment]:
    """Equal layers on each."""
    layers = even_split(len(model.layers), len(profiles))
    return [
        StageAssignment((profile,), part.start, part.stop)
        for profile, part in zip(share_memory(profiles), layers, strict=True)
    ]


# Measured.


class TimedPipeline(bare.Pipeline):
    """Notes when the first token of each prompt came."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.first_s: dict[str, float] = {}
        super().__init__(folder, options)

    def timed(self, work: Workload) -> tuple[float, list[float]]:
        """Output tokens/s, and the seconds to each first token."""
        self.first_s.clear()
        began_s = time.perf_counter()
        speed = self.run(work)
        return speed, [at_s - began_s for at_s in self.first_s.values()]

    def _emit(self, events: object) -> None:
        assert isinstance(events, list)
        for event in events:
            if isinstance(event, NewTokens):
                self.first_s.setdefault(event.key[0], time.perf_counter())
        super()._emit(events)


def measured(options: argparse.Namespace) -> dict[str, float]:
    """The figures of the bare engine with these options."""
    with tempfile.TemporaryDirectory(prefix="shardline-simulated-") as folder:
        pipeline = TimedPipeline(Path(folder), options)
        try:
            pipeline.run(workload(WARM_UP_PROMPTS))
            speed, first_s = pipeline.timed(workload(options.prompts, run=1))
            alone_speed, alone_first_s = pipeline.timed(Workload(workload(1, run=2).prompts))
        finally:
            pipeline.close()
    return {
        "tokens_per_s": speed,
        "ttft_s": statistics.median(first_s),
        "alone_ttft_s": alone_first_s[0],
        "alone_s": NEW_TOKENS / alone_speed,
    }


# Simulated.


def simulated(model: ModelCosts, stages: Sequence[StageAssignment], work: Workload) -> Figures:
    """The same figures, by the devices' profiles."""
    batch = run(model, stages, [len(prompt) for prompt in work.prompts])
    alone = run(model, stages, [len(workload(1, run=2).prompts[0])])
    return Figures(
        tokens_per_s=work.num_output_tokens / batch.ended_s,
        ttft_s=statistics.median(batch.ttft_s),
        alone_ttft_s=alone.ttft_s[0],
        alone_s=alone.ended_s,
    )


def run(model: ModelCosts, stages: Sequence[StageAssignment], lengths: Sequence[int]) -> Tally:
    """Prompts of these lengths, all at once, on a head with a seat for each."""
    _, agenda, tally = begun(model, stages, jobs_of(lengths, NEW_TOKENS))
    agenda.run(lambda: tally.num_ended == len(lengths))
    return tally


def recovery(path: Path, dtype: str, num_rounds: int) -> dict[str, object]:
    """Seconds until the next token, median and worst, after the death of a tail that has a
    spare."""
    argv = [
        sys.executable,
        "-m",
        "tests.benchmarks.recovery",
        "--victim",
        "stage-1",
        "--spare",
        "--stays-away",
    ]
    argv += ["--model", str(path), "--dtype", dtype, "--rounds", str(num_rounds)]
    real = json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
    devices = tuple(Worker(device=device, dtype=dtype) for device in ("cpu:0", "cpu:1"))
    model = ModelCosts.read(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    lengths = [len(tokenizer.encode(prompt).ids) for prompt in PROMPTS]
    gaps_s = stalled(model, assigned(model, unequal.measure(Mix(workers=devices), path)), lengths)
    return {
        "simulated": {"p50_s": statistics.median(gaps_s), "worst_s": max(gaps_s)},
        "measured": {"p50_s": real["p50_s"], "worst_s": real["worst_s"]},
    }


def stalled(
    model: ModelCosts, stages: Sequence[StageAssignment], lengths: Sequence[int]
) -> list[float]:
    """Seconds of the jobs of `tests.benchmarks.recovery`, whose prompts have so many tokens,
    without their tail."""
    jobs = jobs_of(lengths, MAX_TOKENS)
    head, agenda, tally = begun(model, stages, jobs)
    agenda.run(lambda: min(job.num_tokens for job in jobs) >= TOKENS_BEFORE)
    head.lose()
    head.lead(StageChain(model, stages), MAX_BLOCKS, len(stages), FORM_S)
    agenda.run(lambda: len(tally.gaps_s) == len(jobs))
    return tally.gaps_s


def jobs_of(lengths: Sequence[int], output: int) -> list[SimulatedJob]:
    """Jobs with prompts of these lengths."""
    return [
        SimulatedJob(number=number, prompt=length, output=output, arrived_s=0.0)
        for number, length in enumerate(lengths)
    ]


def begun(
    model: ModelCosts, stages: Sequence[StageAssignment], jobs: Sequence[SimulatedJob]
) -> tuple[SimulatedHead, Agenda, Tally]:
    """A head over these stages that has just been given the jobs."""
    agenda = Agenda()
    tally = Tally()
    calls = HeadCalls(
        tokens=lambda job, num: tally.add_tokens(job, num, agenda.now_s),
        ended=lambda job: tally.add_end(job, agenda.now_s),
        failed=refuse,
        given_back=refuse,
        has_room=lambda _head: None,
    )
    config = SchedulerConfig(
        num_blocks=1,
        max_seats=len(jobs),
        token_budget=bare.TOKEN_BUDGET,
        num_lanes=1,
        max_len=bench_model.CONTEXT,
        prefix_cache=False,
    )
    head = SimulatedHead(agenda, config, calls, heartbeat_s=1.0)
    head.lead(StageChain(model, stages), MAX_BLOCKS, len(stages))
    for job in jobs:
        head.add(job)
    return head, agenda, tally


def refuse(job: SimulatedJob) -> None:
    """No job fails here, and none is given back."""
    raise AssertionError(job.number)


if __name__ == "__main__":
    main()
