"""Draws the pictures of a results file: `plots RESULTS FOLDER`. Runs in an environment with
matplotlib."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

COLORS = {
    "shardline": "#1f5fa8",
    "shardline-chain": "#7aa6d8",
    "openvino": "#7a4fb5",
    "vllm": "#d9822b",
    "llamacpp": "#5b8a3c",
}
Cells = list[dict[str, Any]]


def main() -> None:
    """Three pictures, the last one only if there are traces."""
    cells: Cells = json.loads(Path(sys.argv[1]).read_text())["cells"]
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    has_traces = any(cell["workload"].startswith("poisson-") for cell in cells)
    for name, draw in {"throughput": throughput, "alone": alone, "load": load}.items():
        if name == "load" and not has_traces:
            (folder / f"{name}.png").unlink(missing_ok=True)
            continue
        figure = draw(cells)
        figure.tight_layout()
        figure.savefig(folder / f"{name}.png", dpi=100, metadata={"Software": None})


def throughput(cells: Cells) -> Any:
    """Output tokens/s of bf16, a group of bars for each workload."""
    names = [name for name in ("W", "long", "short", "common") if find(cells, "bf16", name)]
    figure, axes = plt.subplots(figsize=(9, 4))
    bars(axes, names, [find(cells, "bf16", name) for name in names], "tokens_per_s")
    axes.set_ylabel("output tokens/s, bf16")
    return figure


def alone(cells: Cells) -> Any:
    """Milliseconds between tokens of one request, a group of bars for each precision."""
    names = [name for name in ("bf16", "fp32", "int8") if find(cells, name, "alone")]
    figure, axes = plt.subplots(figsize=(9, 4))
    bars(axes, names, [find(cells, name, "alone") for name in names], "itl_p50_ms")
    axes.set_ylabel("ms between tokens, one request alone")
    return figure


def load(cells: Cells) -> Any:
    """Waits under random arrivals, against their rate: median full, 99th of 100 dashed."""
    figure, both = plt.subplots(1, 2, figsize=(11, 4))
    traces = [cell for cell in cells if cell["workload"].startswith("poisson-")]
    for axes, what, title in zip(
        both, ("ttft", "itl"), ("first token, ms", "between tokens, ms"), strict=True
    ):
        for engine in dict.fromkeys(cell["engine"] for cell in traces):
            mine = [cell for cell in traces if cell["engine"] == engine]
            rates = [float(cell["workload"].removeprefix("poisson-")) for cell in mine]
            for share, style in (("p50", "-"), ("p99", "--")):
                values = [middle(cell, f"{what}_{share}_ms") for cell in mine]
                axes.plot(
                    rates,
                    values,
                    style,
                    marker="o",
                    color=COLORS[engine],
                    label=f"{engine} {share}",
                )
        axes.set_xlabel("arrivals/s")
        axes.set_ylabel(title)
        axes.set_yscale("log")
        axes.legend(fontsize=7)
    return figure


def bars(axes: Any, names: list[str], groups: list[Cells], what: str) -> None:
    """Bars side by side, each with its value."""
    engines = [
        engine
        for engine in COLORS
        if any(cell["engine"] == engine for group in groups for cell in group)
    ]
    width = 0.8 / max(1, len(engines))
    for place, engine in enumerate(engines):
        points = [
            (index + place * width, middle(cell, what))
            for index, group in enumerate(groups)
            for cell in group
            if cell["engine"] == engine
        ]
        drawn = axes.bar(
            [x for x, _ in points],
            [y for _, y in points],
            width,
            color=COLORS[engine],
            label=engine,
        )
        axes.bar_label(drawn, fmt="%.0f", fontsize=7)
    axes.set_xticks([index + 0.4 - width / 2 for index in range(len(names))], names)
    axes.legend()


def find(cells: Cells, precision: str, workload: str) -> Cells:
    """Cells of one precision and workload."""
    return [
        cell for cell in cells if (cell["precision"], cell["workload"]) == (precision, workload)
    ]


def middle(cell: dict[str, Any], what: str) -> float:
    """The median of a cell's runs."""
    return statistics.median(run[what] for run in cell["runs"])


if __name__ == "__main__":
    main()
