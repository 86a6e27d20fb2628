"""`python -m tests.compose.chaos`: one chaos run against the containers of Compose; `tests.chaos`
has all it needs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated

import typer

from tests.chaos.driver.command import conduct, seeded, wanted
from tests.chaos.driver.runner import judged
from tests.chaos.driver.storm import Say
from tests.chaos.faults.fault import Fault
from tests.chaos.report.report import Report
from tests.chaos.stack.options import Options
from tests.compose.compose_target import LOGS_KEPT, ComposeTarget, compose_target
from tests.compose.container_faults import GROUPS
from tests.compose.engine import Docker, find_or_start
from tests.repository import REPOSITORY

FILE = REPOSITORY / ".local" / "chaos-compose.json"


def run(
    options: Options,
    faults: Sequence[Fault[ComposeTarget]],
    docker: Docker,
    say: Say,
    *,
    max_faults: int | None = None,
) -> Report:
    """One run against a project of its own on this engine."""
    with compose_target(options, docker) as target:
        return judged(options, target, faults, say, max_faults=max_faults)


def main(
    seed: Annotated[
        int | None, typer.Option(help="draws the faults; default: a new one, which is printed")
    ] = None,
    minutes: Annotated[float, typer.Option(help="how long faults are injected")] = 2.0,
    faults: Annotated[
        str, typer.Option(help="all, or groups and kinds with commas between them")
    ] = "all",
) -> None:
    """Hurt a Compose project of its own under load and judge what comes of it; figures in
    .local/chaos-compose.json."""
    options = Options(seed=seeded(seed), minutes=minutes, faults=faults)
    again = f"make chaos-compose SEED={options.seed} MINUTES={minutes:g} FAULTS={faults!r}"
    chosen = wanted(faults, GROUPS)
    docker = find_or_start()
    try:
        conduct(again, partial(run, options, chosen, docker), file=FILE, logs=LOGS_KEPT)
    finally:
        docker.stop()


if __name__ == "__main__":
    typer.run(main)
