"""The demo: a separate stack, 300 prompts with known answers through five doors, a report, and
nothing left behind.

Knows the supervisor only as a command, as a person would use it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

from services.standalone import processes
from services.standalone.demo.clerk.tasks import Example, examples
from services.standalone.demo.producers import DOORS, Producer, submit
from services.standalone.demo.report import (
    DemoPrompt,
    DemoReport,
    num_in_flower,
    report_table,
    sample_table,
    summarize,
)
from services.standalone.processes import StartFailed
from services.standalone.servers import forget_postgres_defaults
from services.standalone.settings import REPOSITORY
from services.standalone.state_dir import StateDir
from shardline.store.connection.database import transaction
from shardline.store.statistics import costs, reports

NUM_PROMPTS = 300
MIN_ACCURACY = 0.95
SEED = 20_260_101
HOME = Path(".local/demo")
JOBS_S = 600.0
FLOWER_S = 60.0
STOP_S = 120.0
POLL_S = 0.2
RATES = {"SHARDLINE_ENERGY_PRICE": "0.30", "SHARDLINE_ENERGY_CARBON": "350"}
"""Examples: money, and grams of CO2 equivalent, for a kWh."""
TERMINAL = {"succeeded", "failed", "cancelled", "expired"}


def run_demo(console: Console) -> bool:
    """Run the demo and print it to `console`. True only if every expectation is met."""
    forget_postgres_defaults()
    state_dir = StateDir(HOME)
    started: list[psutil.Process] = []
    console.print(f"[bold]Starting a stack in {HOME}[/bold] (logs: {state_dir.folder / 'logs'})")
    with _stack(state_dir, started, console) as up:
        producer = Producer(urls=up["urls"], api_key=up["api_key"], model=up["model"])
        asked = _ask(producer, examples(SEED, NUM_PROMPTS, split="unseen"), console)
        ids = [each.id for each in asked]
        _wait_for_answers(producer, asked, console)
        seen = _wait_for_flower(producer, asked)
        with transaction(producer.urls["database"]) as connection:
            found = reports.outcomes(connection, ids)
            spent = costs.spent(connection, ids)
            report = summarize(asked, found, spent=spent, flower_tasks_seen=seen)
            sample = reports.sample(connection, ids)
        started += _family(up["processes"])
    left = [
        process for process in started if not processes.wait_until_gone(process, timeout_s=POLL_S)
    ]
    report = msgspec.structs.replace(report, processes_left=len(left))
    _write(state_dir, report)
    console.print(report_table(report), sample_table(sample))
    return _verdict(report, state_dir, console)


@contextmanager
def _stack(
    state_dir: StateDir, started: list[psutil.Process], console: Console
) -> Iterator[dict[str, Any]]:
    """`make up` in the demo's own folder, on free ports; yields up.json, and stops it whatever
    happens."""
    log = state_dir.folder / "logs" / "supervisor.log"
    with state_dir.lock():
        state_dir.end_leftovers()
        log.unlink(missing_ok=True)
    # If the demo is killed, its supervisor is asked to stop in order.
    argv = [sys.executable, "-m", "services.standalone", "up"]
    supervisor = processes.spawn(
        argv, log=log, env=_environment(state_dir), cwd=REPOSITORY, death_signal="TERM"
    )
    started.append(psutil.Process(supervisor.pid))
    try:
        with console.status("waiting until a completion has passed through every stage"):
            up = _wait_until_up(state_dir, supervisor, log)
        yield up
    finally:
        supervisor.send_signal(signal.SIGTERM)
        supervisor.wait(STOP_S)


def _environment(state_dir: StateDir) -> dict[str, str]:
    """An environment without the caller's own stack: its servers, folder and ports stay
    untouched."""
    foreign = {
        name: value for name, value in os.environ.items() if not name.startswith("SHARDLINE_")
    }
    own = {
        "SHARDLINE_HOME": str(state_dir.folder),
        "SHARDLINE_HTTP_PORT": "0",
        "SHARDLINE_FLOWER_PORT": "0",
    }
    # The model is tiny: more than one core for a stage would only wait for each other.
    return {**foreign, **own, **RATES, "SHARDLINE_STAGE_CORES": "1"}


def _wait_until_up(
    state_dir: StateDir, supervisor: subprocess.Popen[bytes], log: Path
) -> dict[str, Any]:
    while (document := state_dir.published()) is None:
        try:
            supervisor.wait(POLL_S)
        except subprocess.TimeoutExpired:
            continue
        raise StartFailed(f"the stack did not start:\n{processes.tail(log)}")
    return document


def _ask(producer: Producer, prompts: list[Example], console: Console) -> list[DemoPrompt]:
    """An equal share through each door."""
    share = len(prompts) // len(DOORS)
    asked: list[DemoPrompt] = []
    for index, door in enumerate(DOORS):
        part = prompts[index * share : (index + 1) * share]
        begun = time.monotonic()
        ids = submit(producer, door, [example.prompt for example in part])
        console.print(f"  {door}: {len(ids)} prompts in {time.monotonic() - begun:.2f} s")
        pairs = zip(ids, part, strict=True)
        asked += [
            DemoPrompt(id=id_, door=door, task=example.task, answer=example.answer)
            for id_, example in pairs
        ]
    return asked


def _wait_for_answers(producer: Producer, asked: list[DemoPrompt], console: Console) -> None:
    """Follow the rows until every job has ended, one bar for each door."""
    columns = (
        TextColumn("{task.description:>8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    deadline = time.monotonic() + JOBS_S
    with Progress(*columns, console=console) as progress:
        num_asked = Counter(each.door for each in asked)
        bars = {door: progress.add_task(door, total=num) for door, num in num_asked.items()}
        while True:
            with transaction(producer.urls["database"]) as connection:
                state = reports.states(connection, [each.id for each in asked])
            done = Counter(each.door for each in asked if state.get(each.id) in TERMINAL)
            for door, bar in bars.items():
                progress.update(bar, completed=done[door])
            if done == num_asked or time.monotonic() > deadline:
                return
            time.sleep(POLL_S)


def _wait_for_flower(producer: Producer, asked: list[DemoPrompt]) -> int:
    """Wait until Flower, which learns of tasks through events, knows all of them; returns how many
    it knows."""
    ids = [each.id for each in asked]
    retrying = Retrying(
        wait=wait_fixed(POLL_S),
        stop=stop_after_delay(FLOWER_S),
        retry=retry_if_result(lambda num: num < len(ids)),
        retry_error_callback=lambda state: state.outcome.result() if state.outcome else 0,
    )
    num: int = retrying(num_in_flower, producer.urls["flower"], ids)
    return num


def _family(pids: Mapping[str, int]) -> list[psutil.Process]:
    """The stack's processes with all their children."""
    own = [psutil.Process(pid) for pid in pids.values()]
    return [*own, *(child for process in own for child in process.children(recursive=True))]


def _write(state_dir: StateDir, report: DemoReport) -> None:
    path = state_dir.folder.with_suffix(".json")
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))


def _verdict(report: DemoReport, state_dir: StateDir, console: Console) -> bool:
    missing = report.shortfalls(num=NUM_PROMPTS, num_doors=len(DOORS), min_accuracy=MIN_ACCURACY)
    console.print(f"Report: {state_dir.folder.with_suffix('.json')}")
    if missing:
        console.print(f"[bold red]Not all of it holds:[/bold red] {', '.join(missing)}")
    else:
        console.print("[bold green]All of it holds.[/bold green]")
    return not missing
