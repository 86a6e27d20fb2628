"""The cells of a file that are simulated: all of a small fleet, some of a large one, in proportion.
Knows no clock."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from shardline.base.errors import Invalid
from shardline_costs import DeviceProfile, Link, ModelCosts, read_profiles
from shardline_fleet.simulator.datasheets import DATASHEETS
from shardline_fleet.simulator.fleet_file import CellFile, FleetFile
from shardline_fleet.simulator.roofline import profile_of

WITHIN = Link(latency_s=0.0, bytes_per_s=10e9)
"""Between devices of one machine: through its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellKind:
    """Equal cells."""

    profiles: dict[str, DeviceProfile]
    """Of the workers of one, by name."""
    count: int
    num_simulated: int


@dataclass(frozen=True, slots=True)
class SampledFleet:
    """All kinds of cells."""

    kinds: list[CellKind]

    @classmethod
    def of(cls, fleet: FleetFile, model: ModelCosts, folder: Path) -> SampledFleet:
        """Profiles named in the file are relative to `folder`. Raises Invalid."""
        num_cells = sum(cell.count for cell in fleet.cells)
        share = min(1.0, fleet.sample / num_cells)
        return cls(
            [
                CellKind(
                    profiles=_profiles(f"cells[{place}]", cell, fleet, model, folder),
                    count=cell.count,
                    num_simulated=max(1, round(share * cell.count)),
                )
                for place, cell in enumerate(fleet.cells)
            ]
        )

    @property
    def share(self) -> float:
        """Devices that are simulated, of all."""
        simulated = sum(kind.num_simulated * len(kind.profiles) for kind in self.kinds)
        return simulated / sum(kind.count * len(kind.profiles) for kind in self.kinds)


def _profiles(
    field: str, cell: CellFile, fleet: FleetFile, model: ModelCosts, folder: Path
) -> dict[str, DeviceProfile]:
    names = [name for name, num in cell.devices.items() for _ in range(num)]
    machines = [f"machine {place // cell.per_machine}" for place in range(len(names))]
    between = Link(latency_s=cell.latency_ms / 1e3, bytes_per_s=cell.gbit_per_s * 1e9 / 8)
    links = {
        machine: {
            other: WITHIN if other == machine else between for other in dict.fromkeys(machines)
        }
        for machine in dict.fromkeys(machines)
    }
    found = {}
    for place, (name, machine) in enumerate(zip(names, machines, strict=True)):
        device = f"{place:05d}"
        profile = _profile(f"{field}.devices", name, fleet, model, folder)
        found[device] = msgspec.structs.replace(
            profile, device=device, host=machine, machine=machine, links=links[machine]
        )
    return found


def _profile(
    field: str, name: str, fleet: FleetFile, model: ModelCosts, folder: Path
) -> DeviceProfile:
    """The only one of a device with weights of the fleet's dtype."""
    known = device_profiles(field, name, fleet, model, folder)
    profiles = [each for each in known if fleet.dtype in (None, each.dtype)]
    if len(profiles) != 1:
        dtypes = ", ".join(each.dtype for each in known)
        problem = f"{name} has {len(profiles)} profiles to take (its dtypes: {dtypes})"
        raise Invalid(field, problem, "One is needed: set `dtype` in the file of the fleet")
    return profiles[0]


def device_profiles(
    field: str, name: str, fleet: FleetFile, model: ModelCosts, folder: Path
) -> list[DeviceProfile]:
    """All profiles of a device that a fleet names: by its datasheet, or those in its file. Raises
    Invalid."""
    if name in DATASHEETS:
        return [profile_of(DATASHEETS[name], model, fleet.assumed, name, name)]
    if not name.endswith(".json"):
        known = ", ".join(DATASHEETS)
        raise Invalid(
            field,
            f"no datasheet of {name!r}",
            f"Use one of {known}, or a file with a profile, as big.json",
        )
    try:
        profiles = read_profiles((folder / name).read_bytes(), field)
    except OSError as error:
        raise Invalid(
            field, f"{folder / name} cannot be read: {error.strerror}", "Check the path"
        ) from error
    if any(profile.model != model.shapes_id for profile in profiles):
        remedy = "Run `python -m services.stage profile` with this model"
        raise Invalid(field, f"{name} is a profile of another model", remedy)
    return profiles
