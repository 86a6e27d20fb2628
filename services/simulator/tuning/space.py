"""What is tuned, and the values that are tried of each setting. Knows no search and no outcome."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from services.simulator.arrivals import Arrivals
from services.simulator.fleet_file import FleetFile, read_model
from services.simulator.sampled_fleet import SampledFleet, device_profiles
from shardline.errors import Invalid
from shardline.planner import DeviceProfile, ModelCosts, Workload, make_plans_that_fit
from shardline.planner.fleet import moved
from shardline.planner.prediction import Assigned
from shardline.split import even_split

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
    """The even split, the planner's best one and its neighbors: a layer more or less in a stage."""
    even = [Assigned((profiles[0],), part.start, part.stop) for part in even_split(len(model.layers), num_stages)]
    ways = [even]
    try:
        (best, *_) = make_plans_that_fit(model, profiles, load, num_stages=num_stages).best.pipelines
    except Invalid:  # so few do not hold it
        return []
    planned = [Assigned((profiles[0],), stage.first, stage.stop) for stage in best.stages]
    ways += [planned, *moved(planned)]
    return [",".join(f"{stage.first}-{stage.stop - 1}" for stage in way) for way in ways]
