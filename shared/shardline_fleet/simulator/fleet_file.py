"""A fleet, its load and its faults, as a file in YAML describes them. Simulates nothing."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shardline.base.errors import Invalid
from shardline_costs import ModelCosts

REMEDY = "docs/capacity.md#fleet-files has all fields"
MAX_DEVICES = 10_000_000

Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(gt=0, le=1)]
Count = Annotated[int, Meta(ge=1, le=MAX_DEVICES)]
TokenCount = Annotated[int, Meta(ge=1, le=1_000_000)]


class Scenario(StrEnum):
    """How jobs come, named as in MLPerf Inference."""

    OFFLINE = "offline"
    """All at once."""
    SERVER = "server"
    """At random times (Poisson), each to be answered in time."""
    TRACE = "trace"
    """As in a file, each to be answered in time."""


class Assumptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is assumed of devices that were not measured."""

    bandwidth: Share = 0.7
    """Of the published memory bandwidth."""
    compute: Share = 0.5
    """Of the published peak."""
    layer_us: NotNegative = 30.0
    """For launches and small operators of each layer."""


class CellFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Equal cells. A cell is a set of devices that is planned by itself, as the fleet of a model
    is."""

    devices: Annotated[dict[str, Count], Meta(min_length=1)]
    """How many by name of a datasheet, or by a file with a profile (`….json`)."""
    count: Count = 1
    per_machine: Count = 8
    """Devices of a machine."""
    latency_ms: NotNegative = 0.05
    """Between machines."""
    gbit_per_s: Positive = 100.0


class LoadFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The jobs of the whole fleet."""

    scenario: Scenario = Scenario.OFFLINE
    prompt: TokenCount = 512
    """Tokens, on average."""
    output: TokenCount = 128
    spread: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """By how much of the average prompts and outputs are shorter and longer, evenly."""
    jobs: Count = 1000
    """Offline."""
    rate: Positive = 1.0
    """Server: jobs a second."""
    seconds: Positive = 60.0
    """Server: for so long jobs come."""
    trace: str | None = None
    """Trace: file in CSV, with the columns at_s, prompt and output."""
    ttft_s: Positive = 2.0
    """Not offline: bound of the time to the first token, of 99 % of the jobs."""
    token_s: Positive = 0.2
    """Not offline: bound of the mean time between a job's tokens, of 99 % of the jobs."""


class FaultFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What happens to a share of the devices (or to the links of a share of the cells)."""

    at_s: NotNegative
    lose: Share | None = None
    """They are gone."""
    join: Share | None = None
    """They are not there before."""
    slow: Share | None = None
    """Links of this share of the cells have `latency_ms` more."""
    machines: bool = False
    """Whole machines, which fall silent; else processes, with links that close."""
    back_s: Positive | None = None
    """What is lost serves again after so long, loading included; what is slow is as fast as before.
    None: never."""
    latency_ms: NotNegative = 0.0


class FleetFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of it."""

    model: str | dict[str, Any]
    """Folder with a config.json, or the content of such a file."""
    cells: Annotated[list[CellFile], Meta(min_length=1)]
    load: LoadFile = LoadFile()
    faults: list[FaultFile] = []
    assumed: Assumptions = Assumptions()
    seats: Annotated[int, Meta(ge=1, le=4096)] = 64
    token_budget: Annotated[int, Meta(ge=16, le=65536)] = 256
    lanes: Annotated[int, Meta(ge=1, le=16)] | None = None
    """Steps in flight; none: one for each stage."""
    split: str | None = None
    """Layers of all stages by hand, as SHARDLINE_SPLIT has them; none: planned, and planned again
    after losses."""
    dtype: str | None = None
    """Which profiles to take from files that have several; none: their only one."""
    load_s: NotNegative = 30.0
    """A stage needs so long to come back with other layers."""
    sample: Count = 16
    """Cells that are simulated; equal cells are alike, and stand for the others."""
    seed: int = 0

    @property
    def num_devices(self) -> int:
        """Counts the devices of all cells."""
        return sum(cell.count * sum(cell.devices.values()) for cell in self.cells)


def read_fleet(path: Path) -> FleetFile:
    """Reads a file. Raises Invalid, naming the field."""
    try:
        fleet = msgspec.yaml.decode(path.read_bytes(), type=FleetFile)
    except OSError as error:
        raise Invalid(
            str(path), f"it cannot be read: {error.strerror}", "Check the path"
        ) from error
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at ")
        field = re.sub(r"^\$\.?", "", place.strip("`")) or str(path)
        raise Invalid(field, problem, REMEDY) from error
    except msgspec.DecodeError as error:
        raise Invalid(str(path), f"no YAML: {error}", REMEDY) from error
    if (fleet.load.scenario is Scenario.TRACE) != (fleet.load.trace is not None):
        raise Invalid(
            "load.trace", "a file, and `scenario: trace`: neither works alone", "Give both"
        )
    for number, fault in enumerate(fleet.faults):
        _check_fault(f"faults[{number}]", fault)
    if fleet.num_devices > MAX_DEVICES:
        raise Invalid(
            "cells",
            f"{fleet.num_devices:,} devices; at most {MAX_DEVICES:,}",
            "Describe a part of the fleet",
        )
    return fleet


def read_model(fleet: FleetFile, folder: Path) -> ModelCosts:
    """The shapes of the file's model; its path is relative to `folder`. Raises Invalid."""
    try:
        return (
            ModelCosts.of(fleet.model)
            if isinstance(fleet.model, dict)
            else ModelCosts.read(folder / fleet.model)
        )
    except Invalid as error:
        raise Invalid("model", error.problem, error.remedy) from error


def _check_fault(field: str, fault: FaultFile) -> None:
    named = [name for name in ("lose", "join", "slow") if getattr(fault, name) is not None]
    if len(named) != 1:
        raise Invalid(field, f"{len(named)} of lose, join and slow; exactly one is needed", REMEDY)
    if fault.slow is not None and not fault.latency_ms:
        raise Invalid(
            f"{field}.latency_ms",
            "it must be above 0 with slow",
            "Set the additional milliseconds of links",
        )
