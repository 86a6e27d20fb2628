"""`python -m tests.chaos`: one chaos run, told while it goes on. Ends with 0 only if every
invariant held."""

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

SeedOption = Annotated[
    int | None, typer.Option(help="draws the faults; default: a new one, which is printed")
]
MinutesOption = Annotated[float, typer.Option(help="how long faults are injected")]
FaultsOption = Annotated[
    str, typer.Option(help="all, or groups and kinds with commas between them")
]
LoadOption = Annotated[LoadName, typer.Option(help="what is asked for")]
DtypeOption = Annotated[str, typer.Option(help="of the weights; more workers of a fleet of others")]
StagesOption = Annotated[int, typer.Option(help="stages of the pipeline")]
ReplicasOption = Annotated[int, typer.Option(help="pipelines on the same queue")]
WorkersOption = Annotated[
    int | None, typer.Option(help="a fleet of so many workers without a number, no stages")
]
DevicesOption = Annotated[
    str | None,
    typer.Option(help="one for each stage: 'cpu:0 toy:0'; toy: the test accelerator"),
]
StreamedLayersOption = Annotated[
    int, typer.Option(help="of each stage: their weights are read in every step")
]
RanksOption = Annotated[int, typer.Option(help="ranks of each stage, on all cores")]
AdaptersOption = Annotated[int, typer.Option(help="of each model, of which a stage holds half")]
PatienceOption = Annotated[
    float, typer.Option(help="seconds after the last fault in which everything must end")
]
TimeScaleOption = Annotated[
    float, typer.Option(help="of the protocol's times; more where the machine is busy")
]
InsecureOption = Annotated[
    bool, typer.Option("--insecure", help="hops without CURVE: faults of frames need it")
]
InexactOption = Annotated[bool, typer.Option("--inexact", help="attention without our kernel")]
ModelOption = Annotated[
    Path | None, typer.Option(help="a model's folder instead of the demo model")
]
CanvasOption = Annotated[
    bool,
    typer.Option(
        help="of the users' load: a result backend, and a Celery app whose tasks follow jobs"
    ),
]
RedisLastsOption = Annotated[
    bool,
    typer.Option(
        "--redis-lasts", help="the faults spare Redis: what it has taken is never sent again"
    ),
]


def main(
    *,
    seed: SeedOption = None,
    minutes: MinutesOption = 2.0,
    faults: FaultsOption = "all",
    load: LoadOption = LoadName.USERS,
    dtype: DtypeOption = "float32",
    stages: StagesOption = 2,
    replicas: ReplicasOption = 1,
    workers: WorkersOption = None,
    devices: DevicesOption = None,
    streamed_layers: StreamedLayersOption = 0,
    tp: RanksOption = 1,
    adapters: AdaptersOption = 0,
    patience: PatienceOption = 180.0,
    time_scale: TimeScaleOption = TIME_SCALE,
    insecure: InsecureOption = False,
    inexact: InexactOption = False,
    model: ModelOption = None,
    canvas: CanvasOption = True,
    redis_lasts: RedisLastsOption = False,
) -> None:
    """Hurt a stack of its own under load and judge what comes of it; figures in
    .local/chaos.json."""
    first_dtype, *more_dtypes = dtype.split()
    if more_dtypes and workers is None:
        raise typer.BadParameter(
            "only workers of a fleet may be unlike: give --workers too", param_hint="--dtype"
        )
    options = Options(
        seed=seeded(seed),
        minutes=minutes,
        faults=faults,
        load=load,
        dtype=first_dtype,
        more_dtypes=tuple(more_dtypes),
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
    again = f"make chaos {command_line(options)}"
    conduct(again, partial(run, options, wanted(faults, GROUPS)), file=FILE, logs=LOGS_KEPT)


def command_line(options: Options) -> str:
    """The variables of `make chaos` that say the same."""
    dtypes = " ".join([options.dtype, *options.more_dtypes])
    always = {
        "SEED": options.seed,
        "MINUTES": f"{options.minutes:g}",
        "FAULTS": repr(options.faults),
        "LOAD": options.load,
        "DTYPE": repr(dtypes),
        "STAGES": options.stages,
        "TIME_SCALE": f"{options.time_scale:g}",
    }
    if_given = {
        "WORKERS": options.workers,
        "DEVICES": options.devices and repr(options.devices),
        "STREAMED_LAYERS": options.streamed_layers,
        "TP": options.tp if options.tp > 1 else None,
        "ADAPTERS": options.adapters,
        "INSECURE": "yes" if options.insecure else None,
        "CANVAS": None if options.canvas else "no",
    }
    given = always | {name: value for name, value in if_given.items() if value}
    return " ".join(f"{name}={value}" for name, value in given.items())


if __name__ == "__main__":
    typer.run(main)
