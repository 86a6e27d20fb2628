"""Learned policies beside the product's exact ones, in the simulator.

    python -m tests.benchmarks.learned split [--pulls 60] [--learners 3]
    python -m tests.benchmarks.learned steps [--episodes 40] [--learners 3]

- split: a bandit (UCB1) tries splits of unlike devices, one episode each, and takes what was
  fastest on average; beside it the planner, which computes one by the devices' profiles, and
  `shardline tune`, which simulates some beside it.
- steps: a Q-table chooses the token budget of each step by how many jobs decode and how many wait
  for their first token, and learns from the seconds that all jobs spend waiting; beside it fixed
  budgets, of which 256 is the default.

Each line is the median of several learners, judged by episodes that they have not seen.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
from typing_extensions import override

from shardline.base.errors import Invalid
from shardline.contract.fleet.split import even_split
from shardline_costs import ModelCosts
from shardline_costs.prediction import StageAssignment
from shardline_fleet.simulator.agenda import Agenda
from shardline_fleet.simulator.arrivals import Arrivals
from shardline_fleet.simulator.fleet_file import FleetFile, LoadFile, read_model
from shardline_fleet.simulator.job_line import JobLine
from shardline_fleet.simulator.sampled_fleet import SampledFleet
from shardline_fleet.simulator.simulated_head import HeadCalls, SimulatedHead
from shardline_fleet.simulator.simulated_job import SimulatedJob
from shardline_fleet.simulator.simulation import Simulation
from shardline_fleet.simulator.stage_chain import StageChain
from shardline_fleet.simulator.tally import Tally
from shardline_fleet.simulator.tuning import Setting, Tuner, TuningGoal, with_settings
from shardline_scheduler.scheduler_config import SchedulerConfig
from tests.benchmarks.simulated import refuse

MODEL = {
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_attention_heads": 40,
    "vocab_size": 32000,
}
FEW_HEADS = 8
ALL_HEADS = 40
"""That have KV: with all of them two devices hold that of 16 requests beside the weights, not of
64."""
NUM_LAYERS = 40
"""13 billion parameters: no device of 24 GB holds them."""
NUM_JUDGED = 5
"""Episodes by which is judged."""
FIRST_JUDGED = 1_000_000
"""Seed of the first of them."""


# Splits.

FLEETS = ({"a10": 1, "l4": 1}, {"rtx-4090": 1, "l4": 1})
EPISODES = ({"prompt": 512, "output": 64}, {"prompt": 128, "output": 128})
NUM_JOBS = 128
NUM_TRIALS = 30
"""Of the tuner, which has few splits to try."""


def compare_splits(options: argparse.Namespace) -> None:
    """Prints a Markdown table: output tokens/s, and of the bandit also what it had while it
    learned."""
    columns = (
        "devices",
        "KV heads",
        "prompt, output",
        "planner",
        "tune",
        "bandit",
        "bandit, learning",
        "bandit / tune",
    )
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for kv_heads, devices, sizes in product((FEW_HEADS, ALL_HEADS), FLEETS, EPISODES):
        fleet = fleet_of(devices, kv_heads, sizes)
        kept = [setting for setting in Setting if setting is not Setting.SPLIT]
        tuner = Tuner(fleet, Path(), TuningGoal.TOKENS_PER_S, kept)
        _, best, _ = tuner.run(NUM_TRIALS, lambda _number, _trial: None)
        planned = judged_speed(fleet)
        tuned = judged_speed(with_settings(fleet, best.candidate))
        learners = [
            learn_split(fleet, options.pulls, random.Random(seed))
            for seed in range(options.learners)
        ]
        learned = statistics.median(judged_speed(with_split(fleet, split)) for split, _ in learners)
        learning = statistics.median(mean for _, mean in learners)
        shown = (" + ".join(devices), str(kv_heads), ", ".join(map(str, sizes.values())))
        figures = (f"{each:.1f}" for each in (planned, tuned, learned, learning))
        print(f"| {' | '.join((*shown, *figures))} | {learned / tuned:.3f} |", flush=True)


def learn_split(fleet: FleetFile, num_pulls: int, source: random.Random) -> tuple[str, float]:
    """The split that was fastest on average, and the mean speed of all episodes. By UCB1: each
    split once, in random order, then always the one whose mean and uncertainty together promise
    most. One that memory does not hold costs no episode."""
    untried = [f"0-{bound - 1},{bound}-{NUM_LAYERS - 1}" for bound in range(1, NUM_LAYERS)]
    source.shuffle(untried)
    speeds: dict[str, list[float]] = {}
    everything: list[float] = []
    while len(everything) < num_pulls:
        log_pulls = math.log(len(everything) + 1)
        most = max(everything, default=1.0)
        arm = (
            untried.pop() if untried else max(speeds, key=partial(promise, speeds, log_pulls, most))
        )
        try:
            found = speed(with_split(fleet, arm), seed=source.randrange(FIRST_JUDGED))
        except Invalid:
            continue
        speeds.setdefault(arm, []).append(found)
        everything.append(found)
    return max(speeds, key=lambda arm: statistics.mean(speeds[arm])), statistics.mean(everything)


def promise(speeds: dict[str, list[float]], log_pulls: float, most: float, arm: str) -> float:
    """The upper confidence bound of a split, as a share of the highest speed."""
    return statistics.mean(speeds[arm]) / most + math.sqrt(2 * log_pulls / len(speeds[arm]))


def fleet_of(devices: dict[str, int], kv_heads: int, sizes: dict[str, int]) -> FleetFile:
    """Planned as relays plan."""
    text = {
        "model": {**MODEL, "num_hidden_layers": NUM_LAYERS, "num_key_value_heads": kv_heads},
        "cells": [{"devices": devices}],
        "load": {"jobs": NUM_JOBS, "spread": 0.5, **sizes},
    }
    return msgspec.convert(text, FleetFile)


def with_split(fleet: FleetFile, split: str) -> FleetFile:
    """By hand."""
    return msgspec.structs.replace(fleet, split=split)


def speed(fleet: FleetFile, seed: int) -> float:
    """Output tokens/s of an episode."""
    return Simulation(msgspec.structs.replace(fleet, seed=seed), Path()).run().tokens_per_s


def judged_speed(fleet: FleetFile) -> float:
    """The mean of the episodes by which is judged."""
    return statistics.mean(speed(fleet, seed) for seed in judged())


# Steps.

BUDGETS = (64, 128, 256, 512, 1024)
DEFAULT_BUDGET = 256
LOADS = {
    "chat, half full": {
        "scenario": "server",
        "rate": 1.0,
        "prompt": 256,
        "output": 128,
        "spread": 0.8,
    },
    "chat, full": {"scenario": "server", "rate": 2.0, "prompt": 256, "output": 128, "spread": 0.8},
    "long prompts": {
        "scenario": "server",
        "rate": 0.25,
        "prompt": 3000,
        "output": 64,
        "spread": 0.8,
    },
    "batch": {"scenario": "offline", "jobs": 200, "prompt": 512, "output": 64, "spread": 0.8},
}
LEARNING_RATE = 0.1
EXPLORED = 0.1
HORIZON_S = 10.0
"""Of Q-learning; seconds in the far future count less by e for each horizon."""
NUM_BLOCKS = 10_000
State = tuple[int, int]


@dataclass(slots=True)
class QTable:
    """The expected seconds of waiting, less than 0, by state and budget."""

    source: random.Random
    explored: float = EXPLORED
    values: dict[tuple[State, int], float] = field(default_factory=dict)

    def choose(self, state: State) -> int:
        """The best budget that is known, or sometimes any."""
        if self.source.random() < self.explored:
            return self.source.choice(BUDGETS)
        return max(BUDGETS, key=lambda budget: self.values.get((state, budget), 0.0))

    def learn(self, state: State, budget: int, reward: float, discount: float, then: State) -> None:
        """From one step to the next."""
        ahead = max(self.values.get((then, each), 0.0) for each in BUDGETS)
        known = self.values.get((state, budget), 0.0)
        self.values[state, budget] = known + LEARNING_RATE * (reward + discount * ahead - known)


class LearnedHead(SimulatedHead):
    """Asks a table for the budget of each step."""

    def __init__(self, table: QTable, line: JobLine, *given: Any) -> None:
        super().__init__(*given)
        self._table = table
        self._line = line
        self._last: tuple[State, int, float] | None = None

    @override
    def _turn(self, chain: StageChain) -> None:
        jobs = self._jobs.values()
        now_s = self._agenda.now_s
        num_fresh = sum(job.first_s is None for job in jobs)
        state = (len(jobs) - num_fresh).bit_length(), num_fresh.bit_length()
        if self._last is not None:
            before, budget, at_s = self._last
            elapsed_s = now_s - at_s
            num_jobs = len(jobs) + self._line.num_waiting
            self._table.learn(
                before, budget, -elapsed_s * num_jobs, math.exp(-elapsed_s / HORIZON_S), state
            )
        budget = self._table.choose(state)
        self._last = state, budget, now_s
        self._scheduler.config = replace(self._scheduler.config, token_budget=budget)
        super()._turn(chain)


@dataclass(frozen=True, slots=True)
class Chain:
    """The stages of one pipeline: so many L4s with equal layers."""

    num_stages: int

    def made(self) -> StageChain:
        """With nothing under way."""
        text = {
            "model": {**MODEL, "num_hidden_layers": NUM_LAYERS},
            "cells": [{"devices": {"l4": self.num_stages}}],
        }
        fleet = msgspec.convert(text, FleetFile)
        model: ModelCosts = read_model(fleet, Path())
        (kind,) = SampledFleet.of(fleet, model, Path()).kinds
        parts = zip(kind.profiles.values(), even_split(NUM_LAYERS, self.num_stages), strict=True)
        return StageChain(
            model, [StageAssignment((profile,), part.start, part.stop) for profile, part in parts]
        )


def exact(_line: JobLine, *given: Any) -> SimulatedHead:
    """A head as the product has it."""
    return SimulatedHead(*given)


def compare_steps(options: argparse.Namespace) -> None:
    """Prints a Markdown table: mean seconds of a request and the 99th percentile of those to the
    first token."""
    policies = (*(f"budget {budget}" for budget in BUDGETS), "Q-table", "Q-table / best fixed")
    print(f"| stages | load | {' | '.join(policies)} |\n|---|---|{'---|' * len(policies)}")
    for num_stages in (2, 4):
        for name, load in LOADS.items():
            chain = Chain(num_stages)
            jobs = msgspec.convert(load, LoadFile)
            fixed = [judge(chain, jobs, exact, budget) for budget in BUDGETS]
            learners = [
                learn_steps(chain, jobs, options.episodes, seed) for seed in range(options.learners)
            ]
            learned = [
                judge(chain, jobs, partial(LearnedHead, table), DEFAULT_BUDGET)
                for table in learners
            ]
            request_s, ttft_s = (statistics.median(each) for each in zip(*learned, strict=True))
            ratio = request_s / min(each[0] for each in fixed)
            shown = [f"{one:.2f}, {other:.2f}" for one, other in (*fixed, (request_s, ttft_s))]
            print(f"| {num_stages} | {name} | {' | '.join(shown)} | {ratio:.3f} |", flush=True)


def learn_steps(chain: Chain, load: LoadFile, num_episodes: int, seed: int) -> QTable:
    """A table that has seen so many episodes, and explores no more."""
    source = random.Random(seed)
    table = QTable(source)
    for _ in range(num_episodes):
        play(
            chain, load, partial(LearnedHead, table), DEFAULT_BUDGET, source.randrange(FIRST_JUDGED)
        )
    table.explored = 0.0
    return table


def judge(
    chain: Chain, load: LoadFile, head: Callable[..., SimulatedHead], budget: int
) -> tuple[float, float]:
    """Mean seconds of a request, and the 99th percentile of those to its first token."""
    tallies = [play(chain, load, head, budget, seed) for seed in judged()]
    request_s = [seconds for tally in tallies for seconds in tally.request_s]
    ttft_s = [seconds for tally in tallies for seconds in tally.ttft_s]
    return statistics.mean(request_s), statistics.quantiles(ttft_s, n=100)[-1]


def play(
    chain: Chain, load: LoadFile, head: Callable[..., SimulatedHead], budget: int, seed: int
) -> Tally:
    """One episode of one pipeline."""
    agenda = Agenda()
    line = JobLine()
    tally = Tally()
    calls = HeadCalls(
        tokens=lambda job, num: tally.add_tokens(job, num, agenda.now_s),
        ended=lambda job: tally.add_end(job, agenda.now_s),
        failed=refuse,
        given_back=refuse,
        has_room=line.open,
    )
    arrivals = Arrivals(load, Path())
    config = SchedulerConfig(
        num_blocks=1,
        max_seats=64,
        token_budget=budget,
        num_lanes=1,
        max_len=arrivals.max_len,
        prefix_cache=False,
    )
    head(line, agenda, config, calls, 1.0).lead(chain.made(), NUM_BLOCKS, chain.num_stages)
    jobs = [
        SimulatedJob(number=number, prompt=each.prompt, output=each.output, arrived_s=each.at_s)
        for number, each in enumerate(arrivals.of_share(1.0, random.Random(seed)))
    ]
    for job in jobs:
        agenda.at(job.arrived_s, partial(line.put, job))
    agenda.run(lambda: tally.num_ended == len(jobs))
    return tally


def judged() -> Iterator[int]:
    """Yields seeds that no learner sees."""
    yield from range(FIRST_JUDGED, FIRST_JUDGED + NUM_JUDGED)


STUDIES = {"split": compare_splits, "steps": compare_steps}


def main() -> None:
    """Runs one comparison."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("study", choices=STUDIES)
    options.add_argument("--pulls", type=int, default=60, help="episodes of a bandit")
    options.add_argument("--episodes", type=int, default=40, help="of a Q-table")
    options.add_argument("--learners", type=int, default=3, help="with seeds of their own")
    given = options.parse_args()
    STUDIES[given.study](given)


if __name__ == "__main__":
    main()
