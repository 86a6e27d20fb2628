"""The studies of docs/capacity.md, simulated: prints their tables in Markdown.

python -m tests.benchmarks.capacity growth | loss | wan | planner
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence

import msgspec

from shardline_fleet.simulator.fleet_file import FaultFile, FleetFile, read_fleet, read_model
from shardline_fleet.simulator.outcome import Outcome
from shardline_fleet.simulator.plan_book import PlanBook
from shardline_fleet.simulator.sampled_fleet import SampledFleet
from shardline_fleet.simulator.server_load import ServerLoad
from shardline_fleet.simulator.simulation import Simulation
from tests.repository import REPOSITORY

FOLDER = REPOSITORY / "docs" / "capacity"
CELLS = (1, 13, 125, 1250)
"""Of eight devices."""
USED = 0.6
MOSTLY_USED = 0.9
"""Of the predicted speed: what jobs ask for."""
LATENCIES_MS = (1, 5, 20, 50, 100, 200)
LANES = (6, 8, 16, None)
SEATS = (64, 256)
LOST_S = 30.0
BACK_S = 30.0
END_S = 90.0
"""When a tenth is lost, after how long it may be back, and when the last job comes."""
WINDOW_S = 15
SAMPLE = 10
"""Cells, so that a machine is a tenth of them."""
PLANNED = (8, 64, 256, 1024)


def main() -> None:
    """Prints one study."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=STUDIES)
    for row in STUDIES[parser.parse_args().study]():
        print("| " + " | ".join(map(str, row)) + " |", flush=True)


def growth() -> Iterator[Sequence[object]]:
    """The same cells, more and more of them, and what they ask of one stack's servers."""
    yield (
        "devices",
        "tokens/s",
        "jobs/s",
        "first token p50, p99",
        "between tokens p99",
        "simulated in",
    )
    yield ("---",) * 6
    outcomes = []
    for count in CELLS:
        began_s = time.monotonic()
        outcome = run(used(grown(read_fleet(FOLDER / "growth.yaml"), count)))
        outcomes.append(outcome)
        yield (
            f"{outcome.fleet.devices:,}",
            f"{outcome.tokens_per_s:,.0f}",
            f"{outcome.jobs_per_s:,.0f}",
            f"{outcome.ttft_s.p50 * 1e3:,.0f}, {outcome.ttft_s.p99 * 1e3:,.0f} ms",
            f"{outcome.token_s.p99 * 1e3:,.0f} ms",
            f"{time.monotonic() - began_s:.0f} s",
        )
    yield ("as one stack", "limit", *(f"{outcome.fleet.devices:,} devices" for outcome in outcomes))
    yield ("---",) * (2 + len(outcomes))
    for loads in zip(*(outcome.servers for outcome in outcomes), strict=True):
        limit = "" if loads[0].limit is None else f"{loads[0].limit:,.0f}"
        yield (f"{loads[0].server}: {loads[0].what}", limit, *map(shown, loads))


def shown(load: ServerLoad) -> str:
    """Bold if it breaks."""
    amount = f"{load.amount:,.2f}" if load.unit == "cores" else f"{load.amount:,.0f}{load.unit}"
    return f"**{amount}**" if load.breaks else amount


def loss() -> Iterator[Sequence[object]]:
    """A tenth of the fleet at once, while it is mostly used."""
    yield (
        "lost",
        "back",
        "tokens/s before, after, at the end",
        "held up",
        "p50, p99, worst",
        "computed again",
    )
    yield ("---",) * 6
    base = msgspec.structs.replace(
        used(read_fleet(FOLDER / "growth.yaml"), MOSTLY_USED), sample=SAMPLE
    )
    fleet = msgspec.structs.replace(base, load=msgspec.structs.replace(base.load, seconds=END_S))
    for machines in (False, True):
        for back_s in (None, BACK_S):
            fault = FaultFile(at_s=LOST_S, lose=0.1, machines=machines, back_s=back_s)
            outcome = run(msgspec.structs.replace(fleet, faults=[fault]))
            spread = outcome.held_up_s
            moments = (LOST_S - WINDOW_S, LOST_S, END_S - WINDOW_S)
            yield (
                "whole machines" if machines else "processes",
                "never" if back_s is None else f"after {back_s:.0f} s",
                ", ".join(f"{speed(outcome, at_s, WINDOW_S):,.0f}" for at_s in moments),
                f"{outcome.held_up:,.0f} of {outcome.jobs:,.0f} jobs",
                f"{spread.p50:,.1f}, {spread.p99:,.1f}, {spread.worst:,.1f} s",
                f"{outcome.tokens_again:,.0f} tokens",
            )


def wan() -> Iterator[Sequence[object]]:
    """Latency of links against steps in flight."""
    columns = [(seats, lanes) for seats in SEATS for lanes in LANES]
    yield (
        "latency",
        *(f"{seats} seats, {lanes or 'as heads choose'}" for seats, lanes in columns),
        "alone: first, next token",
    )
    yield ("---",) * (2 + len(columns))
    for latency_ms in LATENCIES_MS:
        fleet = read_fleet(FOLDER / "wan.yaml")
        (cell,) = fleet.cells
        far = msgspec.structs.replace(
            fleet, cells=[msgspec.structs.replace(cell, latency_ms=latency_ms)]
        )
        alone = run(msgspec.structs.replace(far, load=msgspec.structs.replace(far.load, jobs=1)))
        outcomes = [
            run(msgspec.structs.replace(far, seats=seats, lanes=lanes)) for seats, lanes in columns
        ]
        yield (
            f"{latency_ms} ms",
            *(f"{outcome.tokens_per_s:,.0f}" for outcome in outcomes),
            f"{alone.ttft_s.p50 * 1e3:,.0f}, {alone.token_s.p50 * 1e3:,.0f} ms",
        )


def planner() -> Iterator[Sequence[object]]:
    """Seconds that a relay's coordinator computes for one plan of a whole fleet."""
    yield ("workers", "one kind", "three kinds")
    yield ("---",) * 3
    for num in PLANNED:
        yield (num, *(f"{plan_s(devices):.2f} s" for devices in ({"h100-sxm": num}, thirds(num))))


def thirds(num: int) -> dict[str, int]:
    """Devices of three kinds."""
    return {"a100-40gb-sxm": num // 4, "l4": num - 2 * (num // 4), "t4": num // 4}


def plan_s(devices: dict[str, int]) -> float:
    """Processor time of the first plan."""
    fleet = read_fleet(FOLDER / "mixed.yaml")
    (cell,) = fleet.cells
    fleet = msgspec.structs.replace(
        fleet, cells=[msgspec.structs.replace(cell, devices=devices, count=1)]
    )
    model = read_model(fleet, FOLDER)
    (kind,) = SampledFleet.of(fleet, model, FOLDER).kinds
    began_s = time.process_time()
    PlanBook(model).first(0, kind.profiles)
    return time.process_time() - began_s


def grown(fleet: FleetFile, count: int) -> FleetFile:
    """With so many cells of each kind."""
    return msgspec.structs.replace(
        fleet, cells=[msgspec.structs.replace(cell, count=count) for cell in fleet.cells]
    )


def used(fleet: FleetFile, share: float = USED) -> FleetFile:
    """Asked for a share of what is predicted."""
    probe = msgspec.structs.replace(fleet.load, rate=1e-3, seconds=1e-3)
    predicted = run(
        msgspec.structs.replace(fleet, load=probe, faults=[])
    ).fleet.predicted_tokens_per_s
    return msgspec.structs.replace(
        fleet, load=msgspec.structs.replace(fleet.load, rate=share * predicted / fleet.load.output)
    )


def run(fleet: FleetFile) -> Outcome:
    """Of a file in this folder."""
    return Simulation(fleet, FOLDER).run()


def speed(outcome: Outcome, from_s: float, seconds: int) -> float:
    """Output tokens/s in so many seconds."""
    return statistics.mean(outcome.timeline[int(from_s) : int(from_s) + seconds])


STUDIES = {"growth": growth, "loss": loss, "wan": wan, "planner": planner}

if __name__ == "__main__":
    main()
