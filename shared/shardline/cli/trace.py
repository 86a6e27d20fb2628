"""`shardline trace`: what the stages did in their last steps, as a file that Perfetto shows. Needs
Celery."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from shardline.base.config import Settings
from shardline.base.errors import Invalid, NotFound, Unavailable
from shardline.cli.database import transaction
from shardline.contract.queues import TRACE_COMMAND, celery_settings
from shardline.contract.wire import StageTrace, StepSpan
from shardline.store.pipelines import live_pipelines


def trace(
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path(
        "trace.json"
    ),
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Only pipelines of this model.")
    ] = None,
    timeout_s: Annotated[
        float, typer.Option(min=0.1, help="How long to wait for the stages' answers.")
    ] = 5.0,
) -> None:
    """Write the last steps of every stage as a trace for https://ui.perfetto.dev or
    chrome://tracing."""
    with transaction() as connection:
        pipelines = live_pipelines(connection)
    workers = [
        stage["worker"]
        for each in pipelines
        if each.ready and model in (None, each.model)
        for stage in each.stages
    ]
    if not workers:
        of_model = f" of {model}" if model else ""
        raise NotFound(f"no pipeline{of_model} is ready: see `shardline pipelines`")
    traces = ask(workers, timeout_s)
    if not traces:
        raise Unavailable(f"no stage answered within {timeout_s} s: {', '.join(workers)}")
    for worker in sorted(set(workers) - {each.worker for each in traces}):
        typer.echo(f"{worker} did not answer: it is not in the trace", err=True)
    output.write_bytes(msgspec.json.encode(chrome_trace(traces)))
    typer.echo(f"{output}: {sum(len(each.steps) for each in traces)} steps of {len(traces)} stages")


def ask(workers: Sequence[str], timeout_s: float) -> list[StageTrace]:
    """What the stages answer by Celery's remote control, in the order of their layers."""
    try:
        from celery import Celery  # noqa: PLC0415 (the other commands do without)
        from kombu.exceptions import OperationalError  # noqa: PLC0415
    except ImportError as error:
        raise Invalid(
            "trace", "it asks the stages through Celery", "pip install 'celery[redis]'"
        ) from error
    with Celery("shardline-trace", set_as_current=False) as app:
        app.conf.update(celery_settings(Settings()))
        try:
            replies = app.control.broadcast(
                TRACE_COMMAND,
                destination=list(workers),
                reply=True,
                timeout=timeout_s,
                limit=len(workers),
            )
        except OperationalError as error:
            raise Unavailable(f"Redis cannot be reached: {error}") from error
    found = [
        msgspec.convert(answer, StageTrace)
        for reply in replies
        for answer in reply.values()
        if "steps" in answer
    ]
    return sorted(found, key=lambda each: (each.pipeline, each.layers))


def chrome_trace(traces: Sequence[StageTrace]) -> dict[str, Any]:
    """The Trace Event Format: one process for each stage. Times are microseconds from the first
    step's begin."""
    zero_us = min(
        (step.began_us - step.wait_us for each in traces for step in each.steps), default=0
    )
    events = [event for pid, each in enumerate(traces) for event in _events(pid, each, zero_us)]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"began_unix_us": zero_us}}


def _events(pid: int, trace: StageTrace, zero_us: int) -> Iterator[dict[str, Any]]:
    first, last = trace.layers
    name = f"{trace.worker}, layers {first}-{last - 1}"
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {
        "ph": "M",
        "name": "process_sort_index",
        "pid": pid,
        "tid": 0,
        "args": {"sort_index": pid},
    }
    for step in trace.steps:
        computed_us = step.compute_began_us + step.compute_us
        # a head is the last to wait before it is idle
        waited_us = step.began_us - (step.idle_us if first == 0 else 0)
        parts = (
            ("wait", waited_us - step.wait_us, waited_us),
            ("hop", step.began_us, step.compute_began_us),
            ("compute", step.compute_began_us, computed_us),
            ("hop", computed_us, step.ended_us),
        )
        for part, began_us, ended_us in parts:
            if ended_us > began_us:
                yield _event(pid, part, began_us - zero_us, ended_us - began_us, step)


def _event(pid: int, name: str, began_us: int, length_us: int, step: StepSpan) -> dict[str, Any]:
    shown = ("epoch", "step", "rows", "tokens", "context", "sampled")
    return {
        "ph": "X",
        "name": name,
        "cat": "stage",
        "pid": pid,
        "tid": 0,
        "ts": began_us,
        "dur": length_us,
        "args": {field: getattr(step, field) for field in shown},
    }
