"""Draws a dashboard's panels by what a Prometheus answers: `picture PROMETHEUS MINUTES FILE`. Needs
matplotlib."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from docker.monitoring.dashboards import FLEET, INSTALLATION, PIPELINE
from docker.monitoring.panels import Panel
from shardline.base.clock import wall_clock_s
from tests.monitoring.queries import over

SHOWN = {
    INSTALLATION: ("Output tokens", "From due to first token", "Between two tokens"),
    PIPELINE: ("Bubble share", "Hop time of a step", "KV in use", "Seats in use", "Prefix hits"),
    FLEET: ("Device utilization", "Power", "Energy of an output token"),
}
COLUMNS = 4


def main() -> None:
    """One picture of a dozen panels."""
    prometheus = sys.argv[1]
    minutes = float(sys.argv[2])
    path = Path(sys.argv[3])
    panels = [
        panel for board, titles in SHOWN.items() for panel in board.panels if panel.title in titles
    ]
    figure, grid = plt.subplots(-(-len(panels) // COLUMNS), COLUMNS, figsize=(14, 7.5))
    for axes, panel in zip(grid.flat, panels, strict=False):
        draw(axes, panel, prometheus, minutes * 60)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    figure.tight_layout()
    figure.savefig(path, dpi=72, metadata={"Software": None})


def draw(axes: Any, panel: Panel, prometheus: str, seconds: float) -> None:
    """A line for each series, against minutes."""
    end_s = wall_clock_s()
    for legend, query in panel.queries:
        for series in over(prometheus, query, start_s=end_s - seconds, end_s=end_s, step_s=5):
            points = [((when - end_s) / 60, float(value)) for when, value in series["values"]]
            axes.plot(
                *zip(*points, strict=True), label=_filled(legend, series["metric"]), linewidth=1.2
            )
    axes.set_title(f"{panel.title} [{panel.unit}]", fontsize=9)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("minutes", fontsize=7)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=6, loc="lower left")


def _filled(legend: str, labels: Mapping[str, str]) -> str:
    return re.sub(
        r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], "").partition("@")[0], legend
    )


if __name__ == "__main__":
    main()
