"""What is tuned, and the values that are tried of each setting. Knows no search and no outcome."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from math import floor
from pathlib import Path
from typing import Any

import msgspec

from shardline.base.errors import Invalid
from shardline.contract.split import even_split
from shardline_fleet.planner import DeviceProfile, ModelCosts, Workload, make_plans_that_fit
from shardline_fleet.simulator.arrivals import Arrivals
from shardline_fleet.simulator.fleet_file import FleetFile, read_model
from shardline_fleet.simulator.sampled_fleet import SampledFleet, device_profiles

SEATS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
TOKEN_BUDGETS = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096)
LANES = (1, 2, 3, 4, 6, 8, 12, 16)
MAX_STAGES = 8
"""Of a pipeline whose splits are tried."""
Value = int | str | None
Candidate = Mapping["Setting", Value]
"""A value of each setting."""


class Setting(StrEnum):
    """A field of a fleet's file, named as the setting of a stage is."""

    SEATS = "seats"
    TOKEN_BUDGET = "token_budget"  # noqa: S105 (no secret)
    LANES = "lanes"
    SPLIT = "split"
    DTYPE = "dtype"


@dataclass(frozen=True, slots=True)
class Space:
    """Values of each setting in their order, or the fleet's own alone; the default is what the fleet's file says."""

    values: Mapping[Setting, Sequence[Value]]
    default: Candidate

    @classmethod
    def of(cls, fleet: FleetFile, folder: Path, kept: Collection[Setting] = ()) -> Space:
        """All that makes sense for a fleet, but for settings that are kept. Raises Invalid."""
        model, default = read_model(fleet, folder), {setting: getattr(fleet, setting) for setting in Setting}
        sampled = SampledFleet.of(fleet, model, folder)
        largest = min(_measured_rows(each) for kind in sampled.kinds for each in kind.profiles.values())
        num_devices = max(len(kind.profiles) for kind in sampled.kinds)
        found: dict[Setting, Sequence[Value]] = {
            Setting.SEATS: SEATS,
            Setting.TOKEN_BUDGET: [rows for rows in TOKEN_BUDGETS if rows <= largest],
            Setting.LANES: [None, *LANES] if num_devices > 1 else [],
            Setting.SPLIT: _splits(fleet, folder, model, sampled),
            Setting.DTYPE: _dtypes(fleet, folder, model),
        }
        for setting, own in default.items():
            if setting in kept:
                found[setting] = [own]
            elif own not in found[setting]:
                found[setting] = _in_order([own, *found[setting]])
        return cls(found, default)

    @property
    def searched(self) -> list[Setting]:
        """Settings with more than one value."""
        return [setting for setting, values in self.values.items() if len(values) > 1]

    def places(self, candidate: Candidate) -> dict[str, int]:
        """Where its values are among those of the settings that are searched."""
        return {setting: self.values[setting].index(candidate[setting]) for setting in self.searched}


def applied(fleet: FleetFile, candidate: Candidate) -> FleetFile:
    """The fleet with these settings."""
    changes: dict[str, Any] = {setting.value: value for setting, value in candidate.items()}
    return msgspec.structs.replace(fleet, **changes)


def _in_order(values: Sequence[Value]) -> list[Value]:
    """Numbers by size; of names the own one first."""
    return sorted(values, key=lambda value: value if isinstance(value, int) else 0)


def _measured_rows(profile: DeviceProfile) -> float:
    """The most packed rows that a device was timed with: of more its profile knows too little to tune by."""
    return min(times.rows[-1][0] for times in profile.layers.values())


def _dtypes(fleet: FleetFile, folder: Path, model: ModelCosts) -> list[Value]:
    """Those of which every device has a profile."""
    names = {name for cell in fleet.cells for name in cell.devices}
    each = [{found.dtype for found in device_profiles("cells", name, fleet, model, folder)} for name in names]
    common = set.intersection(*each)
    return [*sorted(common)] if len(common) > 1 else []


def _splits(fleet: FleetFile, folder: Path, model: ModelCosts, sampled: SampledFleet) -> list[Value]:
    """Of cells of one kind: with one stage and more, or with as many as the fleet's own split has by hand."""
    if len(sampled.kinds) > 1:
        return []
    profiles = [*sampled.kinds[0].profiles.values()]
    own = fleet.split and fleet.split.count(",") + 1
    most = min(len(profiles), len(model.layers), MAX_STAGES)
    arrivals = Arrivals(fleet.load, folder)
    load = Workload(prompt=arrivals.prompt, output=max(2, arrivals.output), token_budget=fleet.token_budget)
    found: dict[str, None] = {}
    for num_stages in [own] if own else range(1, most + 1):
        found |= dict.fromkeys(_splits_of(model, profiles, load, num_stages))
    return [*found]


def _splits_of(model: ModelCosts, profiles: Sequence[DeviceProfile], load: Workload, num_stages: int) -> list[str]:
    """The even split, the planner's for the load, and its for one request, which leaves KV no more room than that; all
    on the way from one to the next, and those a layer away from the load's. None if so few devices do not hold it."""
    try:
        full, one = (_planned(model, profiles, each, num_stages) for each in (load, replace(load, concurrency=1)))
    except Invalid:
        return []
    num_layers = len(model.layers)
    even = [part.start for part in even_split(num_layers, num_stages)[1:]]
    ways = [*_between(even, full), *_between(full, one), *_near(full, num_layers)]
    return [",".join(f"{first}-{stop - 1}" for first, stop in pairwise([0, *way, num_layers])) for way in ways]


def _planned(model: ModelCosts, profiles: Sequence[DeviceProfile], load: Workload, num_stages: int) -> list[int]:
    """Where the stages of the fastest pipeline begin, but for the first. Raises Invalid."""
    (pipeline, *_) = make_plans_that_fit(model, profiles, load, num_stages=num_stages).best.pipelines
    return [stage.first for stage in pipeline.stages[1:]]


def _between(one: Sequence[int], other: Sequence[int]) -> Iterator[list[int]]:
    """Yields boundaries that move from one place to the other, all together, by a layer at most."""
    num_steps = max((abs(a - b) for a, b in zip(one, other, strict=True)), default=0)
    for step in range(num_steps + 1):
        share = step / max(1, num_steps)
        # Not to the nearest even number: boundaries a layer apart must stay apart.
        yield [floor(a + (b - a) * share + 0.5) for a, b in zip(one, other, strict=True)]


def _near(bounds: Sequence[int], num_layers: int) -> Iterator[list[int]]:
    """Yields the same boundaries with one of them moved by a layer, as far as each stage keeps one."""
    for place, bound in enumerate(bounds):
        before, behind = [0, *bounds][place], [*bounds, num_layers][place + 1]
        for moved in (bound - 1, bound + 1):
            if before < moved < behind:
                yield [*bounds[:place], moved, *bounds[place + 1 :]]
