"""`python -m tests.chaos`: one chaos run, told while it goes on. Ends with 0 only if every invariant held."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tests.chaos.driver.catalog import GROUPS
from tests.chaos.driver.command import conduct, seeded, wanted
from tests.chaos.driver.runner import run
from tests.chaos.load.workload import LoadName
from tests.chaos.report.report import FILE
from tests.chaos.stack.local_target import LOGS_KEPT
from tests.chaos.stack.options import TIME_SCALE, Options


def main(
    *,
    seed: Annotated[int | None, typer.Option(help="draws the faults; default: a new one, which is printed")] = None,
    minutes: Annotated[float, typer.Option(help="how long faults are injected")] = 2.0,
    faults: Annotated[str, typer.Option(help="all, or groups and kinds with commas between them")] = "all",
    load: Annotated[LoadName, typer.Option(help="what is asked for")] = LoadName.USERS,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or int8")] = "float32",
    stages: Annotated[int, typer.Option(help="stages of the pipeline")] = 2,
    replicas: Annotated[int, typer.Option(help="pipelines on the same queue")] = 1,
    workers: Annotated[int | None, typer.Option(help="a fleet of so many workers without a number, no stages")] = None,
    devices: Annotated[
        str | None, typer.Option(help="one for each stage: 'cpu:0 toy:0'; toy: the test accelerator")
    ] = None,
    streamed_layers: Annotated[int, typer.Option(help="of each stage: their weights are read in every step")] = 0,
    tp: Annotated[int, typer.Option(help="ranks of each stage, on all cores")] = 1,
    adapters: Annotated[int, typer.Option(help="of each model, of which a stage holds half")] = 0,
    patience: Annotated[float, typer.Option(help="seconds after the last fault in which everything must end")] = 180.0,
    time_scale: Annotated[
        float, typer.Option(help="of the protocol's times; more where the machine is busy")
    ] = TIME_SCALE,
    insecure: Annotated[bool, typer.Option("--insecure", help="hops without CURVE: faults of frames need it")] = False,
    inexact: Annotated[bool, typer.Option("--inexact", help="attention without our kernel")] = False,
    model: Annotated[Path | None, typer.Option(help="a model's folder instead of the demo model")] = None,
    canvas: Annotated[
        bool, typer.Option(help="of the users' load: a result backend, and a Celery app whose tasks follow jobs")
    ] = True,
    redis_lasts: Annotated[
        bool, typer.Option("--redis-lasts", help="the faults spare Redis: what it has taken is never sent again")
    ] = False,
) -> None:
    """Hurt a stack of its own under load and judge what comes of it; figures in .local/chaos.json."""
    options = Options(
        seed=seeded(seed),
        minutes=minutes,
        faults=faults,
        load=load,
        dtype=dtype,
        stages=stages,
        replicas=replicas,
        workers=workers,
        devices=devices,
        streamed_layers=streamed_layers,
        tp=tp,
        adapters=adapters,
        time_scale=time_scale,
        exact=not inexact,
        insecure=insecure,
        patience_s=patience,
        model=model,
        canvas=canvas,
        redis_lasts=redis_lasts,
    )
    what = f"FAULTS={faults!r} LOAD={load} DTYPE={dtype} STAGES={stages} TIME_SCALE={time_scale:g}"
    shape = f"{f' WORKERS={workers}' if workers else ''}{f' DEVICES={devices!r}' if devices else ''}"
    streamed = f"{f' STREAMED_LAYERS={streamed_layers}' if streamed_layers else ''}{f' TP={tp}' if tp > 1 else ''}"
    adapted = f" ADAPTERS={adapters}" if adapters else ""
    plain = "" if canvas else " CANVAS=no"
    more = f"{shape}{streamed}{adapted}{' INSECURE=yes' if insecure else ''}{plain}"
    again = f"make chaos SEED={options.seed} MINUTES={minutes:g} {what}{more}"
    conduct(again, partial(run, options, wanted(faults, GROUPS)), file=FILE, logs=LOGS_KEPT)


if __name__ == "__main__":
    typer.run(main)
