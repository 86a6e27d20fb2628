"""One run of the benchmark: installs, loads, asks in turn, keeps results. Knows no table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from services.standalone.preload import mimalloc
from tests.benchmarks.peers.measure import Served, Unfair
from tests.benchmarks.peers.peer import NUM_CORES, PEERS, Peer, Unavailable, model
from tests.benchmarks.peers.plan import OURS, PLAN, Schedule
from tests.benchmarks.peers.resident import Resident
from tests.benchmarks.peers.results import FULL, HALF, SERVICE, Results
from tests.benchmarks.peers.roof import products_s
from tests.benchmarks.peers.shardline import Shardline
from tests.benchmarks.peers.workloads import Shape, Work
from tests.repository import REPOSITORY

WARM_UP = 1 << 10
"""The run whose prompts no measured run has."""
WARM_UP_PROMPTS = 16
WARM_UP_TOKENS = 16


@dataclass(slots=True, kw_only=True)
class Session:
    """`shapes` are the chosen workloads, `peers` the chosen engines, both in order."""

    results: Results
    peers: dict[str, Peer]
    shapes: dict[str, Shape]
    rounds: int
    keep: Callable[[], None]
    """Called after every figure."""

    def run(self) -> None:
        """Everything, precision by precision."""
        self._prepare()
        self._measure_limits()
        for precision, workloads in PLAN.items():
            wanted = {
                name: asked for name, asked in workloads.items() if set(asked) & set(self.shapes)
            }
            engines = [
                name
                for name in wanted
                if name in self.peers and precision in self.peers[name].precisions
            ]
            with self._loaded(engines, precision) as residents:
                self._rounds(precision, residents, Schedule(list(residents), workloads))
            if precision == "bf16" and OURS in engines and "W" in self.shapes:
                try:
                    self._beside()
                except (Unavailable, Unfair, subprocess.CalledProcessError) as reason:
                    self._skip("an engine on each core, and the service", reason)

    def _prepare(self) -> None:
        for name, peer in list(self.peers.items()):
            say(f"{name}: environment")
            try:
                peer.install()
                for precision in (one for one in PLAN if name in PLAN[one]):
                    peer.convert(precision)
            except Unavailable as reason:
                self._skip(name, reason)
                del self.peers[name]

    def _measure_limits(self) -> None:
        say("limits of the machine")
        self.results.limits = _call("tests.benchmarks.peers.limits")
        products = self.results.limits["products"]
        for precision in sorted({one["precision"] for one in products}):
            for name, shape in self.shapes.items():
                work = shape.work(0)
                ceiling = work.num_output_tokens / products_s(work, products, precision, NUM_CORES)
                self.results.ceilings[f"{precision} {name}"] = round(ceiling, 1)

    @contextmanager
    def _loaded(self, names: Sequence[str], precision: str) -> Iterator[dict[str, Resident]]:
        with ExitStack() as stack:
            residents: dict[str, Resident] = {}
            for name in names:
                say(f"{name} {precision}: load")
                try:
                    resident = Resident(
                        name, self.peers[name].command(precision), PEERS / f"{name}-{precision}.log"
                    )
                    stack.callback(resident.close)
                    resident.run(warm_up(self.shapes))
                except (Unavailable, Unfair) as reason:
                    self._skip(f"{name} {precision}", reason)
                    continue
                self.results.versions |= resident.versions
                residents[name] = resident
            yield residents

    def _rounds(self, precision: str, residents: dict[str, Resident], schedule: Schedule) -> None:
        ours: dict[str, Served] = {}
        for number in range(self.rounds):
            for workload, engine in schedule.round(number, self.shapes):
                work = self.shapes[workload].work(1 + number)
                try:
                    served = residents[engine].run(work)
                except (Unavailable, Unfair) as reason:
                    self._skip(f"{engine} {precision} {workload}", reason)
                    schedule.drop(engine if isinstance(reason, Unavailable) else (workload, engine))
                    continue
                schedule.note(workload, engine, served.wall_s)
                if engine == OURS:
                    ours[workload] = served
                same = ours.get(workload)
                self.results.note(
                    precision,
                    workload,
                    engine,
                    served,
                    same if same and same.work == work else None,
                )
                say(
                    f"{number + 1}/{self.rounds} {precision} {workload} {engine}:"
                    f" {served.tokens_per_s:.1f} tokens/s"
                )
                self.keep()

    def _beside(self) -> None:
        """W in bf16 by an engine on each core, both at once; then by the whole service."""
        work = self.shapes["W"].work
        half = _half
        cores = [Shardline(f"core-{core}") for core in range(NUM_CORES)]
        with ExitStack() as stack:
            pair = []
            for core in cores:
                pair.append(Resident(core.name, core.command("bf16"), PEERS / f"{core.name}.log"))
                stack.callback(pair[-1].close)
                pair[-1].run(warm_up(self.shapes))
            for number in range(self.rounds):
                self._rate(
                    HALF,
                    together(pair, [half(work(1 + number), place) for place in range(NUM_CORES)]),
                )
                # Another run's prompts: the engines have the KV of those.
                self._rate(FULL, together(pair, [work(1 + self.rounds + number)] * NUM_CORES))
        prompts = str(len(work(0).prompts))
        arguments = ("--model", str(model("bf16")), "--dtype", "bfloat16", "--stages", "1")
        runs = ("--prompts", prompts, "--runs", str(self.rounds))
        said = _call("tests.benchmarks.service", *arguments, *runs)
        for rate in said["tokens_per_s"]:
            self._rate(SERVICE, rate)

    def _rate(self, name: str, tokens_per_s: float) -> None:
        self.results.rates.setdefault(name, []).append(round(tokens_per_s, 1))
        say(f"W bf16 {name}: {tokens_per_s:.1f} tokens/s")
        self.keep()

    def _skip(self, name: str, reason: Exception) -> None:
        say(f"skipped {name}: {reason}")
        self.results.skipped[name] = str(reason)


def warm_up(shapes: dict[str, Shape]) -> Work:
    """A few prompts of one of the workloads: what allocates and compiles does it now."""
    full = next(iter(shapes.values())).work(WARM_UP)
    num_prompts = min(WARM_UP_PROMPTS, len(full.prompts))
    return Work(
        prompts=full.prompts[:num_prompts],
        new_tokens=WARM_UP_TOKENS,
        arrivals_s=(0.0,) * num_prompts,
    )


def together(residents: Sequence[Resident], works: Sequence[Work]) -> float:
    """Sum of the output tokens/s of engines that run at the same time."""
    with ThreadPoolExecutor(max_workers=len(residents)) as pool:
        served = pool.map(lambda resident, work: resident.run(work), residents, works)
    return sum(one.tokens_per_s for one in served)


def _half(work: Work, place: int) -> Work:
    """Every second request, or every n-th on n cores."""
    return Work(
        prompts=work.prompts[place::NUM_CORES],
        new_tokens=work.new_tokens,
        arrivals_s=work.arrivals_s[place::NUM_CORES],
    )


def _call(module: str, *arguments: str) -> Any:
    """One benchmark in a process of its own, with the allocator of stages: its JSON line."""
    argv = [sys.executable, "-m", module, *arguments]
    environment = os.environ | ({"LD_PRELOAD": mimalloc()} if module.endswith("limits") else {})
    done = subprocess.run(
        argv, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def say(text: str) -> None:
    """Prints a line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
