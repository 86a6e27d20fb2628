"""From SIGKILL of a stage under 64 running sequences to the next streamed token of each, with and
without a spare.

python -m tests.benchmarks.recovery --victim stage-1 [--spare [--stays-away]] [--model DIR --dtype
float32] [--rounds 3]

A spare is a further process with the victim's layers, on the victim's core: with --stays-away the
victim starts again only when the round is over, as if its machine were lost, so that it does not
load where the spare computes. A further head leads a pipeline of its own as soon as it finds stages
that are free. Phases are seconds from SIGKILL to the first such moment, by the logs of the stack:
medians of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
from tenacity import retry, retry_if_result, stop_after_delay, wait_fixed

from services.stage.pipeline.registry import RedisRegistry
from services.standalone.settings import CLERK
from services.standalone.state_dir import SUPERVISOR, StateDir
from shardline.client import AsyncClient
from tests.benchmarks.service import stack

HEAD = "stage-0"
TAIL = "stage-1"
SEQUENCES = 64
PROMPTS = [f"sort: {number}, 7 =" for number in range(SEQUENCES)]
MAX_TOKENS = 380
TOKENS_BEFORE = 20
"""Deltas of each sequence, when the victim dies."""
FLYING_S = 0.1
"""What comes sooner was under way."""
START_S = 120.0
EVENTS = {
    "shard loaded": ("stage-0", "stage-1"),
    "bound": ("stage-1",),
    "pipeline ready": ("stage-0", "spare"),
    "job swept": ("relay",),
}
"""Moments of a recovery, and the logs in which they stand."""


def main() -> None:
    """Prints seconds as one JSON line: median and worst of all sequences in all rounds, the phases,
    and the start of a stage that is no fork of the warm parent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--victim", choices=(HEAD, TAIL), required=True)
    parser.add_argument(
        "--spare", action="store_true", help="a further process waits with the victim's layers"
    )
    parser.add_argument(
        "--stays-away", action="store_true", help="the victim does not start again meanwhile"
    )
    parser.add_argument("--model", default=str(CLERK))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.stays_away and not options.spare:
        parser.error("--stays-away needs --spare: without one nobody takes the victim's place")
    gaps: list[float] = []
    starts: list[float] = []
    phases: dict[str, list[float]] = defaultdict(list)
    with stack(options.model, options.dtype, 2) as up:
        home = StateDir(Path(up["home"]))
        for _ in range(options.rounds):
            with spare(home, options.victim) as start_s:
                starts.append(start_s)
                if options.spare:
                    with supervisor_stopped(home) if options.stays_away else nullcontext():
                        gaps += asyncio.run(kill(home, options.victim, phases))
            if not options.spare:
                gaps += asyncio.run(kill(home, options.victim, phases))
    figures = {"p50_s": statistics.median(gaps), "worst_s": max(gaps), "num_gaps": len(gaps)}
    figures["cold_start_s"] = statistics.median(starts)
    medians = {name: round(statistics.median(each), 3) for name, each in phases.items()}
    print(
        json.dumps(
            {**figures, "phases_s": medians, "victim": options.victim, "spare": options.spare}
        )
    )


async def kill(home: StateDir, victim: str, phases: dict[str, list[float]]) -> list[float]:
    """One round: seconds until the next token of each sequence that was running."""
    up = up_of(home)
    async with AsyncClient(
        database_url=up["urls"]["database"], redis_url=up["urls"]["redis"]
    ) as client:
        common = {"model": up["model"], "max_tokens": MAX_TOKENS, "ignore_eos": True}
        ids = await client.submit_many(
            [{**common, "prompt": prompt, "seed": seed} for seed, prompt in enumerate(PROMPTS)]
        )
        arrivals: dict[UUID, list[float]] = {job_id: [] for job_id in ids}
        running = asyncio.Event()
        readers = [asyncio.create_task(read(client, job_id, arrivals, running)) for job_id in ids]
        await asyncio.wait_for(running.wait(), START_S)
        killed_s = time.monotonic()
        killed_at = datetime.now(UTC)
        killed_since_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        os.kill(killed := up["processes"][victim], signal.SIGKILL)
        await asyncio.gather(*readers)
    gaps = [
        min(after) - killed_s
        for each in arrivals.values()
        if (after := [at for at in each if at > killed_s + FLYING_S])
    ]
    if (pid := up_of(home)["processes"][victim]) != killed:
        phases["process started"].append(since_boot_s(pid) - killed_since_boot_s)
    for event, logs in EVENTS.items():
        if moments := [
            at
            for name in logs
            for at in moments_of(home.folder / "logs" / f"{name}.log", event, killed_at)
        ]:
            phases[event].append(min(moments))
    phases["first token"].append(min(gaps))
    return gaps


@contextmanager
def supervisor_stopped(home: StateDir) -> Iterator[None]:
    """While entered, nobody starts anew what dies."""
    supervisor = home.recorded()[SUPERVISOR].pid
    os.kill(supervisor, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(supervisor, signal.SIGCONT)


def since_boot_s(pid: int) -> float:
    """When a process started, as its system says: exact to a hundredth of a second, unlike the wall
    clock's time."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf(
        "SC_CLK_TCK"
    )


def moments_of(log: Path, event: str, since: datetime) -> Iterator[float]:
    """Seconds from `since` until each such event in a log, as far as they are later."""
    for line in log.read_text().splitlines() if log.exists() else ():
        if line.startswith("{") and (entry := json.loads(line))["event"] == event:
            after_s = (datetime.fromisoformat(entry["timestamp"]) - since).total_seconds()
            if after_s > 0:
                yield after_s


async def read(
    client: AsyncClient, job_id: UUID, arrivals: dict[UUID, list[float]], running: asyncio.Event
) -> None:
    """Notes when deltas come, and when every sequence has enough of them."""
    async for _ in client.stream(job_id):
        arrivals[job_id].append(time.monotonic())
        if not running.is_set() and min(map(len, arrivals.values())) >= TOKENS_BEFORE:
            running.set()


@contextmanager
def spare(home: StateDir, place: str) -> Iterator[float]:
    """A further process with the layers of `place`, on its core. Gives the seconds of its start and
    load."""
    up = up_of(home)
    stage = psutil.Process(up["processes"][place])
    own = {
        "SHARDLINE_LOCK_DIR": str(home.folder / "spare-locks"),
        "SHARDLINE_WORKER_NAME": "spare",
        "SHARDLINE_PIPELINE": "spare",
    }
    told = home.folder / "logs" / "spare.log"
    registry = RedisRegistry(up["urls"]["redis"])
    num_before = len(registry.cards(up["model"]))
    waits = {
        HEAD: lambda: b"pipeline not assembled" in told.read_bytes(),
        TAIL: lambda: len(registry.cards(up["model"])) > num_before,
    }
    began_s = time.monotonic()
    with told.open("wb") as log:
        twin = subprocess.Popen(
            [sys.executable, "-m", "services.stage"],
            env=stage.environ() | own,
            cwd=stage.cwd(),
            stdout=log,
            stderr=log,
        )
    try:
        wait(waits[place])
        yield time.monotonic() - began_s
    finally:
        twin.terminate()
        twin.wait()
        wait(lambda: len(registry.cards(up["model"])) >= num_before)
        registry.close()


def up_of(home: StateDir) -> dict[str, Any]:
    """up.json as it is now."""
    up = home.published()
    assert up is not None
    return up


@retry(
    wait=wait_fixed(0.05),
    stop=stop_after_delay(START_S),
    retry=retry_if_result(lambda holds: not holds),
)
def wait(condition: Callable[[], bool]) -> bool:
    """Until it holds."""
    return condition()


if __name__ == "__main__":
    main()
