"""MLPerf's scenarios on the real service and on the simulator: a fleet of workers, a core each,
under the same load.

    python -m tests.benchmarks.scenarios [--model DIR] [--workers 2] [--rate 1.0] [--seconds 60]
    [--jobs 64]

Offline: all jobs at once. Server: jobs at random (Poisson), each followed as a stream by the
client, at each of the rates. The simulator gets the profiles that the workers have measured, and
plans as the relay does. Prints a line for each scenario: what was measured beside what was
simulated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shardline.client import AsyncClient
from shardline.store import fleets
from shardline.store.connection.database import transaction
from shardline_fleet.simulator.fleet_file import CellFile, FleetFile, LoadFile, Scenario
from shardline_fleet.simulator.outcome import Outcome
from shardline_fleet.simulator.simulated_job import SimulatedJob
from shardline_fleet.simulator.simulation import Simulation
from shardline_fleet.simulator.tally import Tally
from tests.benchmarks import model as bench_model
from tests.benchmarks.service import stack

PROMPT = 160
OUTPUT = 64
SPREAD = 0.6
"""Tokens of a job on average, and by how much some are shorter and longer."""
SEATS = 64
TOKEN_BUDGET = 256
LOAD_S = 30.0
RATES = (0.5, 1.0)
WARM_UP = LoadFile(jobs=16, prompt=PROMPT, output=OUTPUT, spread=SPREAD)


def main() -> None:
    """Starts a stack, then runs one scenario after the other on it."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--model", type=Path, help="default: the model of `make bench`")
    options.add_argument("--workers", type=int, default=2)
    options.add_argument(
        "--rate", type=float, action="append", help="jobs a second; several times for several runs"
    )
    options.add_argument("--seconds", type=float, default=60.0, help="for so long jobs come")
    options.add_argument("--jobs", type=int, default=64, help="offline")
    given = options.parse_args()
    folder = given.model or bench_model.make(Path.home() / ".cache" / "shardline-bench", "bfloat16")
    sizes: dict[str, Any] = {"prompt": PROMPT, "output": OUTPUT, "spread": SPREAD}
    servers = [
        LoadFile(scenario=Scenario.SERVER, rate=rate, seconds=given.seconds, **sizes)
        for rate in given.rate or (0.5, 1.0)
    ]
    loads = [LoadFile(jobs=given.jobs, **sizes), *servers]
    settings = {
        "WORKERS": str(given.workers),
        "SEATS": str(SEATS),
        "INTERACTIVE_SEATS": "0",
        "PROMPT_LOOKUP": "0",
    }
    shape = {f"SHARDLINE_{name}": value for name, value in settings.items()}
    with stack(str(folder), "bfloat16", 1, **shape) as up:
        fleet = fleet_of(up, folder)
        asyncio.run(serve(up, WARM_UP, seed=0))
        for seed, load in enumerate(loads, start=1):
            simulated = Simulation(
                msgspec.structs.replace(fleet, load=load, seed=seed), Path()
            ).run()
            served = asyncio.run(serve(up, load, seed=seed))
            measured = Outcome.of(simulated.fleet, 1.0, load, served, served.num_ended)
            found = {"simulated": figures(simulated), "measured": figures(measured)}
            print(json.dumps({"scenario": load.scenario, "rate": load.rate, **found}), flush=True)


def figures(outcome: Outcome) -> dict[str, float | bool | None]:
    """Those that a user would ask for."""
    return {
        "tokens_per_s": round(outcome.tokens_per_s, 1),
        "ttft_p50_s": round(outcome.ttft_s.p50, 3),
        "ttft_p99_s": round(outcome.ttft_s.p99, 3),
        "token_p50_s": round(outcome.token_s.p50, 4),
        "token_p99_s": round(outcome.token_s.p99, 4),
        "keeps_bounds": outcome.keeps_bounds,
    }


def fleet_of(up: dict[str, Any], model: Path) -> FleetFile:
    """What the simulator is told of the stack's workers: their own profiles."""
    with transaction(up["urls"]["database"]) as connection:
        workers = fleets.workers_of(connection, up["model"])
    devices = {}
    for number, worker in enumerate(workers):
        path = Path(up["home"], f"{number}.json")
        path.write_bytes(msgspec.json.encode(worker.profile))
        devices[str(path)] = 1
    cell = CellFile(devices=devices, per_machine=len(devices))
    return FleetFile(
        model=str(model), cells=[cell], seats=SEATS, token_budget=TOKEN_BUDGET, load_s=LOAD_S
    )


async def serve(up: dict[str, Any], load: LoadFile, *, seed: int) -> Tally:
    """All jobs of a load, to their ends, each followed as a stream."""
    # jobs as the simulator draws them
    drawn = random.Random(seed)
    ids = random.Random(seed)
    tally = Tally()
    urls = {"database_url": up["urls"]["database"], "redis_url": up["urls"]["redis"]}
    async with AsyncClient(**urls) as client, asyncio.TaskGroup() as group:
        never = asyncio.Event()
        began_s = time.perf_counter()
        for number, at_s in enumerate(arrivals(load, drawn)):
            with suppress(TimeoutError):  # an arrival is a matter of time alone
                await asyncio.wait_for(never.wait(), began_s + at_s - time.perf_counter())
            num_prompt = size(load.prompt, load, drawn)
            num_output = size(load.output, load, drawn)
            job = SimulatedJob(number=number, prompt=num_prompt, output=num_output, arrived_s=at_s)
            prompt = [ids.randrange(3, bench_model.VOCABULARY) for _ in range(job.prompt)]
            group.create_task(follow(client, up["model"], prompt, Followed(job, tally, began_s)))
    return tally


class Followed(NamedTuple):
    """A job, and where its tokens are counted."""

    job: SimulatedJob
    tally: Tally
    began_s: float
    """When the scenario began, by the performance counter."""


async def follow(client: AsyncClient, model: str, prompt: list[int], followed: Followed) -> None:
    """From the submit to the last token."""
    job, tally, began_s = followed
    params: dict[str, Any] = {"max_tokens": job.output, "temperature": 0, "ignore_eos": True}
    async for delta in client.stream(await client.submit(model, prompt, **params)):
        now_s = time.perf_counter() - began_s
        if delta.ids:
            job.num_tokens += len(delta.ids)
            tally.add_tokens(job, len(delta.ids), now_s)
        if delta.state is not None:
            tally.add_end(job, now_s)


def arrivals(load: LoadFile, drawn: random.Random) -> Iterator[float]:
    """Seconds after the beginning."""
    if load.scenario is Scenario.OFFLINE:
        yield from [0.0] * load.jobs
        return
    at_s = drawn.expovariate(load.rate)
    while at_s < load.seconds:
        yield at_s
        at_s += drawn.expovariate(load.rate)


def size(mean: int, load: LoadFile, drawn: random.Random) -> int:
    """Tokens of one prompt or output."""
    spread = round(load.spread * mean)
    return drawn.randint(mean - spread, mean + spread)


if __name__ == "__main__":
    main()
