"""Results as Markdown: for the terminal and for docs/performance.md. Knows no process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from tests.benchmarks.peers.measure import FIRST_TOKENS
from tests.benchmarks.peers.plan import AT_ONCE, OURS, PLAN, SLOW, TRACES
from tests.benchmarks.peers.results import FULL, HALF, SERVICE, Cell, Results
from tests.benchmarks.peers.roof import weights_ms
from tests.benchmarks.peers.workloads import shapes

NAMES = {
    OURS: "Shardline",
    "shardline-chain": "Shardline, a stage on each core",
    "openvino": "OpenVINO GenAI",
    "vllm": "vLLM",
    "llamacpp": "llama.cpp",
}
PLOTS = ("throughput", "alone", "load")
INTRODUCTION = """\
# Performance beside other engines

Written by `make bench-peers`; do not edit. Compare ratios of one run, not figures of different
machines.

Every engine gets the same token ids and all cores, and gives exactly as many tokens as asked for
(greedy); the others are stopped. Shardline is its bare engine, one stage, without prompt
lookup, unless a row says otherwise."""


def markdown(results: Results) -> str:
    """The whole page but for its plots."""
    parts = [INTRODUCTION, _workloads(results), _machine(results)]
    parts += [part for precision in PLAN for part in _precision(results, precision)]
    parts += [_traces(results), _together(results), _limits(results), _skipped(results)]
    return "\n\n".join(part for part in parts if part) + "\n"


def with_plots(page: str, folder: Path) -> str:
    """The page with the pictures that `plots` drew into `folder`, beside it."""
    pictures = [
        f"![{name}]({folder.name}/{name}.png)"
        for name in PLOTS
        if (folder / f"{name}.png").exists()
    ]
    return page + "\n" + "\n\n".join(pictures) + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its first column of words."""
    lines = [f"| {' | '.join(line)} |" for line in (head, *rows)]
    lines.insert(1, f"|---|{'---:|' * (len(head) - 1)}")
    return "\n".join(lines)


def _workloads(results: Results) -> str:
    together = [name for name in AT_ONCE if name != "alone"]
    named = [
        name for name in together if any(_cells(results, precision, name) for precision in PLAN)
    ]
    if not named:
        return ""
    lines = [f"- {name}: {shapes()[name].title}" for name in named]
    slow = f"In parentheses: one run, {SLOW:g} times as long as the fastest or longer."
    return "\n".join([f"Figures are medians of all rounds. {slow}", "", *lines])


def _machine(results: Results) -> str:
    rows = [[name, str(value)] for name, value in results.machine.items()]
    rows += [["command", f"`{results.command}`"], ["rounds", str(results.rounds)]]
    rows += [[name, release] for name, release in results.versions.items()]
    return table(["machine", "and versions"], rows).replace("---:", "---")


def _precision(results: Results, precision: str) -> list[str]:
    engines = results.engines(precision)
    if not engines:
        return []
    return [
        f"## {precision}",
        *_throughput(results, precision, engines),
        _alone(results, precision, engines),
    ]


def _throughput(results: Results, precision: str, engines: Sequence[str]) -> list[str]:
    names = [name for name in AT_ONCE if name != "alone" and _cells(results, precision, name)]
    if not names:
        return []
    head = ["output tokens/s", *names]
    rows = [
        [NAMES[engine], *(_rate(results, precision, name, engine) for name in names)]
        for engine in engines
    ]
    best = [_lead(results, precision, name) for name in names]
    if any(best):
        rows.append(["Shardline / best of the others", *best])
    if rates := results.rates.get(SERVICE) if precision == "bf16" else None:
        rows.append(["Shardline, whole service", f"{median(rates):.0f}", *[""] * (len(names) - 1)])
    shares = [_share(results, precision, name) for name in names]
    if any(shares):
        rows.append(["products at full rate / Shardline's time", *shares])
    agree = [
        [NAMES[engine], *(_agreement(results, precision, name, engine) for name in names)]
        for engine in engines
    ]
    parts = [table(head, rows)]
    if any(any(row[1:]) for row in agree):
        title = f"first {FIRST_TOKENS} tokens equal to ours"
        parts.append(table([title, *names], [row for row in agree if any(row[1:])]))
    return parts


def _alone(results: Results, precision: str, engines: Sequence[str]) -> str:
    rows = []
    for engine in engines:
        if cell := results.cell(precision, "alone", engine):
            one = cell.median
            seconds = 64 / one.tokens_per_s
            rows.append(
                [NAMES[engine], f"{one.ttft_p50_ms:.0f}", f"{one.itl_p50_ms:.1f}", f"{seconds:.2f}"]
            )
    if not rows:
        return ""
    if stream := results.limits.get("stream_gb_per_s"):
        floor = weights_ms(precision, max(stream.values()))
        rows.append(["all weights read once", "", f"{floor:.1f}", ""])
    return table(
        ["one request alone, 128 in, 64 out", "first token, ms", "between tokens, ms", "whole, s"],
        rows,
    )


def _traces(results: Results) -> str:
    rows = []
    for name in TRACES:
        for cell in _cells(results, "bf16", name):
            one = cell.median
            waits = (one.ttft_p50_ms, one.ttft_p99_ms, one.itl_p50_ms, one.itl_p99_ms)
            rows.append(
                [
                    f"{name.split('-')[1]}/s, {NAMES[cell.engine]}",
                    *(f"{value:.0f}" for value in waits),
                ]
            )
    if not rows:
        return ""
    head = ["arrivals, bf16", "TTFT p50, ms", "TTFT p99, ms", "between tokens p50, ms", "p99, ms"]
    said = "Requests of W that arrive at random times (Poisson)."
    return f"## Under load\n\n{said}\n\n{table(head, rows)}"


def _together(results: Results) -> str:
    cell = results.cell("bf16", "W", OURS)
    rows = [
        [
            f"an engine on each core, sum, {title}",
            f"{median(results.rates[name]):.0f}",
            _of(cell, results, name),
        ]
        for name, title in ((HALF, "half of W each"), (FULL, "all of W each"))
        if results.rates.get(name)
    ]
    if not rows:
        return ""
    return "## Two cores apart\n\n" + table(
        ["W, bf16", "output tokens/s", "Shardline's share of it"], rows
    )


def _of(cell: Cell | None, results: Results, name: str) -> str:
    return f"{cell.median.tokens_per_s / median(results.rates[name]):.2f}" if cell else ""


def _limits(results: Results) -> str:
    products = results.limits.get("products")
    if not products:
        return ""
    best: dict[tuple[str, int], float] = {}
    for one in products:
        of = one["precision"], one["threads"]
        best[of] = max(one["gflop_per_s"], best.get(of, 0.0))
    names = sorted({name for name, _ in best})
    rows = [
        [str(n), str(rate), *(f"{best[name, int(n)]:.0f}" for name in names)]
        for n, rate in results.limits["stream_gb_per_s"].items()
    ]
    head = ["cores", "memory, GB/s", *(f"oneDNN {name}, GFLOP/s" for name in names)]
    return f"## Limits of the machine\n\n{table(head, rows)}"


def _skipped(results: Results) -> str:
    lines = [f"- {name}: {reason}" for name, reason in results.skipped.items()]
    return "\n".join(["## Skipped", "", *lines]) if lines else ""


def _cells(results: Results, precision: str, workload: str) -> list[Cell]:
    found = (results.cell(precision, workload, engine) for engine in results.engines(precision))
    return [cell for cell in found if cell is not None]


def _rate(results: Results, precision: str, workload: str, engine: str) -> str:
    cell = results.cell(precision, workload, engine)
    if cell is None:
        return ""
    rate = f"{cell.median.tokens_per_s:.0f}"
    return f"({rate})" if len(cell.runs) < results.rounds else rate


def _agreement(results: Results, precision: str, workload: str, engine: str) -> str:
    cell = results.cell(precision, workload, engine)
    return "" if cell is None or cell.agreement is None else f"{cell.agreement:.2f}"


def _lead(results: Results, precision: str, workload: str) -> str:
    ours = results.cell(precision, workload, OURS)
    others = [
        cell for cell in _cells(results, precision, workload) if not cell.engine.startswith(OURS)
    ]
    if ours is None or not others:
        return ""
    return f"{ours.median.tokens_per_s / max(cell.median.tokens_per_s for cell in others):.2f}"


def _share(results: Results, precision: str, workload: str) -> str:
    ours = results.cell(precision, workload, OURS)
    ceiling = results.ceilings.get(f"{precision} {workload}")
    return "" if ours is None or ceiling is None else f"{ours.median.tokens_per_s / ceiling:.2f}"
