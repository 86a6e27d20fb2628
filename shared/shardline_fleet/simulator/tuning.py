"""Searches the settings that suit a load best, in the simulator: an experiment.

It starts from the settings of the fleet's file, tries other values of one setting at a time and
keeps what is better. The result counts only if it is better with other seeds too: one draw of a
random load may suit any settings.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from shardline.base.errors import Invalid
from shardline.contract.fleet.split import even_split
from shardline_costs import DeviceProfile, ModelCosts, Workload
from shardline_fleet.planner import make_plans_that_fit
from shardline_fleet.simulator.arrivals import Arrivals
from shardline_fleet.simulator.fleet_file import FleetFile, LoadFile, read_model
from shardline_fleet.simulator.outcome import Outcome
from shardline_fleet.simulator.sampled_fleet import SampledFleet, device_profiles
from shardline_fleet.simulator.simulation import Simulation

SEATS = (8, 16, 32, 64, 128, 256, 512)
TOKEN_BUDGETS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
LANES = (1, 2, 4, 8, 16)
MAX_STAGES = 8
LEAST_GAIN = 1.02
"""The simulator tells no smaller difference apart, nor is a smaller one worth a change."""
NUM_CHECKS = 3
"""Other seeds with which the best settings are simulated next to the default ones."""
BROKEN_BOUND = 1e6
"""What exceeding a bound by its own length costs: more than any goal's seconds, so that bounds come
first."""

Setting = StrEnum("Setting", "SEATS TOKEN_BUDGET LANES SPLIT DTYPE")
"""A field of a fleet's file, named as the setting of a stage is."""
Candidate = Mapping[Setting, int | str | None]
"""A value of each setting."""


class TuningGoal(StrEnum):
    """Latencies are of all jobs, in the percentile of the name."""

    TOKENS_PER_S = "tokens-per-s"
    TTFT_P50 = "ttft-p50"
    TTFT_P99 = "ttft-p99"
    REQUEST_P50 = "request-p50"
    REQUEST_P99 = "request-p99"


@dataclass(frozen=True, slots=True)
class Trial:
    """Settings and what they gave; no cost if jobs were left, no outcome if the fleet cannot run
    so."""

    candidate: Candidate
    cost: float | None = None
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True)
class Tuner:
    """Searches the settings of one fleet. Paths in its file are relative to `folder`."""

    fleet: FleetFile
    folder: Path
    goal: TuningGoal
    kept: Collection[Setting] = ()

    def run(
        self, num_trials: int, report: Callable[[int, Trial], None]
    ) -> tuple[Trial, Trial, float]:
        """The trial of the default settings, that of the best, and how many times as good these
        are. Raises Invalid."""
        values = values_to_try(self.fleet, self.folder)
        choices = [
            (setting, value)
            for setting in Setting
            if setting not in self.kept
            for value in values[setting]
        ]
        own = {setting: getattr(self.fleet, setting) for setting in Setting}
        default = best = self.simulate(own, self.fleet.seed)
        if default.cost is None:
            raise Invalid(
                "load", "with the default settings jobs are left without an end", "Ask for less"
            )
        report(0, default)
        tried = [own]
        previous = None
        while best is not previous:
            previous = best
            for setting, value in choices:
                candidate = {**best.candidate, setting: value}
                if candidate in tried or len(tried) == num_trials:
                    continue
                trial = self.simulate(candidate, self.fleet.seed)
                report(len(tried), trial)
                tried.append(candidate)
                best = trial if gain(best, trial) >= LEAST_GAIN else best
        seeds = range(self.fleet.seed + 1, self.fleet.seed + 1 + NUM_CHECKS)
        gains = [
            gain(*(self.simulate(each.candidate, seed) for each in (default, best)))
            for seed in seeds
        ]
        if min(gains) < 1 or statistics.median(gains) < LEAST_GAIN:
            return default, default, 1.0
        return default, best, statistics.median(gains)

    def simulate(self, candidate: Candidate, seed: int) -> Trial:
        """Runs the fleet with these settings. Raises Invalid if it cannot run with its own."""
        fleet = with_settings(self.fleet, candidate, seed=seed)
        try:
            outcome = Simulation(fleet, self.folder).run()
        except Invalid:
            if fleet == self.fleet:
                raise
            return Trial(candidate)
        return Trial(candidate, cost_of(self.goal, outcome, fleet.load), outcome)


def with_settings(fleet: FleetFile, candidate: Candidate, **others: Any) -> FleetFile:
    """The fleet with these settings."""
    return msgspec.structs.replace(
        fleet, **{setting.value: value for setting, value in candidate.items()}, **others
    )


def gain(default: Trial, other: Trial) -> float:
    """How many times as good the other is; 0 if either leaves jobs."""
    return default.cost / other.cost if default.cost is not None and other.cost is not None else 0.0


def cost_of(goal: TuningGoal, outcome: Outcome, load: LoadFile) -> float | None:
    """Seconds to be as few as can be, of an output token or a latency; None if jobs were left
    without an end."""
    if outcome.unfinished or outcome.failed or not outcome.tokens_per_s:
        return None
    latency, _, percentile = goal.partition("-")
    spread = outcome.ttft_s if latency == "ttft" else outcome.request_s
    seconds = (
        1 / outcome.tokens_per_s
        if goal is TuningGoal.TOKENS_PER_S
        else float(getattr(spread, percentile))
    )
    if outcome.keeps_bounds is False:
        excess = max(outcome.ttft_s.p99 / load.ttft_s, outcome.token_s.p99 / load.token_s) - 1
        seconds += BROKEN_BOUND * max(0.0, excess)
    return seconds


def values_to_try(fleet: FleetFile, folder: Path) -> dict[Setting, Sequence[int | str | None]]:
    """Values of each setting; of token budgets none beyond the rows that the devices were measured
    with."""
    model = read_model(fleet, folder)
    kinds = SampledFleet.of(fleet, model, folder).kinds
    profiles = [profile for kind in kinds for profile in kind.profiles.values()]
    most_rows = min(times.rows[-1][0] for profile in profiles for times in profile.layers.values())
    names = {name for cell in fleet.cells for name in cell.devices}
    dtypes = [
        {each.dtype for each in device_profiles("cells", name, fleet, model, folder)}
        for name in names
    ]
    return {
        Setting.SEATS: SEATS,
        Setting.TOKEN_BUDGET: [rows for rows in TOKEN_BUDGETS if rows <= most_rows],
        Setting.LANES: LANES if any(len(kind.profiles) > 1 for kind in kinds) else [],
        Setting.SPLIT: _splits(fleet, folder, model, profiles) if len(kinds) == 1 else [],
        Setting.DTYPE: sorted(set.intersection(*dtypes)) if fleet.dtype is not None else [],
    }


def _splits(
    fleet: FleetFile, folder: Path, model: ModelCosts, profiles: Sequence[DeviceProfile]
) -> list[str]:
    """The even split and the planner's, with as many stages as the fleet's own split has, or with
    any number."""
    arrivals = Arrivals(fleet.load, folder)
    num_layers = len(model.layers)
    load = Workload(
        prompt=arrivals.prompt, output=max(2, arrivals.output), token_budget=fleet.token_budget
    )
    # A plan for one request leaves KV no more room than that, and is the faster one where memory is
    # scarce.
    loads = (load, replace(load, concurrency=1))
    starts: list[list[int]] = []
    most = min(len(profiles), num_layers, MAX_STAGES)
    for num_stages in [fleet.split.count(",") + 1] if fleet.split else range(1, most + 1):
        try:
            plans = [
                make_plans_that_fit(model, profiles, each, num_stages=num_stages).best
                for each in loads
            ]
        except Invalid:
            continue
        starts.append([layers.start for layers in even_split(num_layers, num_stages)])
        starts += [[stage.first for stage in plan.pipelines[0].stages] for plan in plans]
    return [",".join(f"{a}-{b - 1}" for a, b in pairwise([*each, num_layers])) for each in starts]
