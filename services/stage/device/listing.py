"""`python -m services.stage devices`: the devices of this machine, as SHARDLINE_DEVICE names them.

Reads locks and starts nothing. Knows no stage and no model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from services.stage.device import cpu
from services.stage.device.accelerator import accelerators, load_module
from services.stage.device.locks import holder
from services.stage.device.machine import instruction_sets
from shardline_server.host.cores import parse_cores, show_cores
from shardline_server.host.private import user_folder

NODES = Path("/sys/devices/system/node")


class ListingSettings(BaseSettings):
    """Those of a stage's settings that decide what it can take."""

    model_config = SettingsConfigDict(env_prefix="SHARDLINE_", frozen=True, extra="ignore")

    lock_dir: Path = Field(default_factory=lambda: user_folder() / "locks")
    device_module: str | None = None


class DeviceEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One device. The cores of a NUMA node are one, though a stage may take some of them."""

    name: str
    """For SHARDLINE_DEVICE."""
    kind: str
    """`cpu`, or the accelerator's name."""
    memory_bytes: int
    cores: int = 0
    instruction_sets: tuple[str, ...] = ()
    numa_node: int | None = None
    held_by: dict[str, str] = {}
    """By lock, such as `core-0`: the worker that holds it."""


def devices(lock_folder: Path) -> list[DeviceEntry]:
    """Returns all devices of this machine: the cores of each NUMA node, then accelerators, those
    with most memory first."""
    return [*_cores(lock_folder), *_accelerators(lock_folder)]


def _cores(lock_folder: Path) -> list[DeviceEntry]:
    listed = []
    for node, cores in _nodes().items():
        listed.append(
            DeviceEntry(
                name=f"cpu:{show_cores(cores)}",
                kind="cpu",
                memory_bytes=cpu.memory_bytes(),
                cores=len(cores),
                instruction_sets=tuple(instruction_sets()),
                numa_node=node,
                held_by=_held(lock_folder, [cpu.lock_name(core) for core in cores]),
            )
        )
    return listed


def _accelerators(lock_folder: Path) -> list[DeviceEntry]:
    return [
        DeviceEntry(
            name=found.name,
            kind=found.model(),
            memory_bytes=found.total_bytes(),
            held_by=_held(lock_folder, [found.lock_name]),
        )
        for found in accelerators()
    ]


def _nodes() -> dict[int | None, tuple[int, ...]]:
    """The usable cores by NUMA node; all under None where Linux does not tell."""
    usable = cpu.usable_cores()
    nodes: dict[int | None, tuple[int, ...]] = {}
    for folder in sorted(NODES.glob("node[0-9]*")):
        text = (folder / "cpulist").read_text(encoding="ascii").strip()
        here = tuple(
            core for core in (parse_cores(f"cpu:{text}") if text else ()) if core in usable
        )
        if here:
            nodes[int(folder.name.removeprefix("node"))] = here
    return nodes or {None: usable}


def _held(lock_folder: Path, names: list[str]) -> dict[str, str]:
    holders = {name: holder(lock_folder, name) for name in names}
    return {name: worker for name, worker in holders.items() if worker is not None}


def main(arguments: list[str]) -> int:
    """Prints a line for each device, or all as JSON; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m services.stage devices", description="Lists devices."
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    as_json = parser.parse_args(arguments).json
    settings = ListingSettings()
    load_module(settings.device_module)
    listed = devices(settings.lock_dir)
    if as_json:
        sys.stdout.write(msgspec.json.encode(listed).decode() + "\n")
        return 0
    for one in listed:
        facts = [one.kind, f"{one.memory_bytes / 2**30:.1f} GiB"]
        facts += [f"{one.cores} cores"] if one.cores else []
        facts += [f"NUMA node {one.numa_node}"] if one.numa_node is not None else []
        facts += [", ".join(one.instruction_sets)] if one.instruction_sets else []
        facts += [f"{name} held by {worker}" for name, worker in one.held_by.items()]
        sys.stdout.write(f"{one.name}: {'; '.join(facts)}\n")
    return 0
