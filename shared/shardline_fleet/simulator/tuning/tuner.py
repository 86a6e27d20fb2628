"""The search: Optuna proposes settings, the simulator says what they cost, what is better elsewhere too is taken.

The default settings are the first trial. The best ones are simulated beside them once more, with arrivals and sizes of
other seeds: settings that suit one draw of a random load, and no other, are left.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import optuna
from optuna.trial import TrialState

from shardline.base.errors import Invalid
from shardline_fleet.simulator.fleet_file import FleetFile
from shardline_fleet.simulator.outcome import Outcome
from shardline_fleet.simulator.simulation import Simulation
from shardline_fleet.simulator.tuning.goal import TuningGoal, cost_of
from shardline_fleet.simulator.tuning.space import Candidate, Setting, Space, applied

LEAST_GAIN = 1.02
"""Other settings must be better by so much: the simulator tells no less apart, nor is less worth a change."""
WORTH = 1.005
"""A setting that makes less of a difference stays as it is by default."""
NUM_CHECKS = 3
"""Other seeds with which the best settings are simulated beside the default ones."""
NUM_CHECKED = 5
"""Settings that are checked in turn, the best first, until one holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """Settings and what they gave; no cost if jobs were left, no outcome if the fleet cannot run so."""

    candidate: Candidate
    cost: float | None
    outcome: Outcome | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What a search has found."""

    default: Tried
    best: Tried
    """The default itself, if nothing better holds."""
    gain: float
    """How many times as good the best is, the median of the seeds it was checked with."""
    tried: tuple[Tried, ...]
    """All that differ, the best first."""


class Tuner:
    """Searches once."""

    def __init__(self, fleet: FleetFile, folder: Path, goal: TuningGoal, space: Space) -> None:
        """Paths in the fleet are relative to `folder`."""
        self._fleet, self._folder, self._goal, self._space = fleet, folder, goal, space
        self._tried: dict[tuple[object, ...], Tried] = {}

    def run(self, num_trials: int, tell: Callable[[int, Tried], None]) -> Tuned:
        """Tries so many settings, telling of each, checks the best. Raises Invalid if the default cannot run."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=self._fleet.seed))
        study.enqueue_trial(self._space.places(self._space.default))
        for number in range(num_trials):
            trial = study.ask()
            tried = self._try(self._suggested(trial))
            if number == 0 and tried.cost is None:
                raise Invalid("load", "with the default settings jobs are left without an end", "Ask for less")
            if tried.cost is None:
                study.tell(trial, state=TrialState.PRUNED)
            else:
                study.tell(trial, tried.cost)
            tell(number, tried)
        return self._chosen()

    def _suggested(self, trial: optuna.Trial) -> Candidate:
        """Numbers are proposed by their place among the values, which lie as far apart as they are large."""
        found = dict(self._space.default)
        for setting in self._space.searched:
            values = self._space.values[setting]
            if setting in (Setting.SPLIT, Setting.DTYPE):
                place = trial.suggest_categorical(setting, range(len(values)))
            else:
                place = trial.suggest_int(setting, 0, len(values) - 1)
            found[setting] = values[place]
        return found

    def _try(self, candidate: Candidate) -> Tried:
        """Simulates what was not simulated before."""
        key = tuple(candidate.values())
        if key not in self._tried:
            self._tried[key] = self._simulated(candidate, self._fleet.seed)
        return self._tried[key]

    def _simulated(self, candidate: Candidate, seed: int) -> Tried:
        fleet = msgspec.structs.replace(applied(self._fleet, candidate), seed=seed)
        try:
            outcome = Simulation(fleet, self._folder).run()
        except Invalid:
            if candidate == self._space.default:
                raise
            return Tried(candidate=candidate, cost=None, outcome=None)
        return Tried(candidate=candidate, cost=cost_of(self._goal, outcome, fleet.load), outcome=outcome)

    def _chosen(self) -> Tuned:
        default = self._try(self._space.default)
        assert default.cost is not None
        able = sorted((each for each in self._tried.values() if each.cost is not None), key=_cost)
        better = [each for each in able if _cost(each) * LEAST_GAIN <= default.cost]
        before = [self._simulated(default.candidate, seed) for seed in self._checks] if better else []
        for best in map(self._plain, better[:NUM_CHECKED]):
            gains = [
                self._gain(of_default, self._simulated(best.candidate, seed))
                for seed, of_default in zip(self._checks, before, strict=True)
            ]
            if min(gains) >= 1 and statistics.median(gains) >= LEAST_GAIN:
                return Tuned(default=default, best=best, gain=statistics.median(gains), tried=tuple(able))
        return Tuned(default=default, best=default, gain=1.0, tried=tuple(able))

    def _plain(self, tried: Tried) -> Tried:
        """The same settings, but the default of each that it can do without: a search also proposes what is of no use,
        and the simulator does not know all that a setting does."""
        found = tried
        for setting in self._space.searched:
            other = self._try({**found.candidate, setting: self._space.default[setting]})
            if other.cost is not None and other.cost <= WORTH * _cost(tried):
                found = other
        return found

    @property
    def _checks(self) -> range:
        """Seeds that no search has seen."""
        return range(self._fleet.seed + 1, self._fleet.seed + 1 + NUM_CHECKS)

    @staticmethod
    def _gain(default: Tried, other: Tried) -> float:
        """How many times as good; 0 if either leaves jobs."""
        return default.cost / other.cost if default.cost is not None and other.cost is not None else 0.0


def _cost(tried: Tried) -> float:
    assert tried.cost is not None
    return tried.cost
