"""`make bench-peers`: Shardline, OpenVINO GenAI, vLLM and llama.cpp in turn, beside the limits of
this machine.

python -m tests.benchmarks.peers [--only NAME …] [--runs 3] [--quick] [--report]
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from tests.benchmarks.peers.machine import describe
from tests.benchmarks.peers.peer import PEERS, Environment, Unavailable
from tests.benchmarks.peers.plan import peers
from tests.benchmarks.peers.report import markdown, with_plots
from tests.benchmarks.peers.results import Results
from tests.benchmarks.peers.session import Session
from tests.benchmarks.peers.workloads import shapes
from tests.repository import REPOSITORY

KEPT = REPOSITORY / "tests" / "benchmarks" / "results" / "peers.json"
"""Of a whole run."""
PART = PEERS / "latest.json"
"""Of a run with --only or --quick."""
PAGE = REPOSITORY / "docs" / "performance.md"


def main() -> None:
    """Prints the tables. A whole run also writes results, page and plots into the repository."""
    options = _parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    is_whole = not (options.only or options.quick)
    path = KEPT if is_whole else PART
    if not options.report:
        results = Results(command=_command(), machine=describe(), rounds=options.runs)
        _session(options, results, path).run()
        results.save(path)
    results = Results.load(path)
    page = markdown(results)
    has_plots = _draw(path, PAGE.with_suffix("") if is_whole else PEERS / "pictures")
    if is_whole:
        PAGE.write_text(with_plots(page, PAGE.with_suffix("")) if has_plots else page)
    Console(width=140).print(Markdown(page))
    print(f"{path}, {PAGE if is_whole else 'page not written: the run was not whole'}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*peers(), *shapes()]
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="NAME", help=f"of: {' '.join(names)}"
    )
    parser.add_argument("--runs", type=int, default=3, help="rounds; the tables have medians")
    parser.add_argument("--quick", action="store_true", help="an eighth of the requests, one round")
    parser.add_argument(
        "--report", action="store_true", help="tables, page and plots of the last results, no run"
    )
    return parser


def _session(options: argparse.Namespace, results: Results, path: Path) -> Session:
    every = peers()
    known = shapes(quick=options.quick)
    only = options.only or []
    results.rounds = 1 if options.quick else options.runs
    return Session(
        results=results,
        peers={
            name: peer for name, peer in every.items() if name in only or not set(only) & set(every)
        },
        shapes={
            name: shape
            for name, shape in known.items()
            if name in only or not set(only) & set(known)
        },
        rounds=results.rounds,
        keep=lambda: results.save(path),
    )


def _draw(path: Path, folder: Path) -> bool:
    """Whether the pictures were drawn: matplotlib has an environment of its own."""
    environment = Environment("plots")
    try:
        environment.provide("matplotlib")
        environment.call(
            [
                str(environment.python),
                "-m",
                "tests.benchmarks.peers.runners.plots",
                str(path),
                str(folder),
            ]
        )
    except Unavailable as reason:
        print(f"no plots: {reason}")
        return False
    return True


def _command() -> str:
    arguments = " ".join(sys.argv[1:])
    return f"python -m tests.benchmarks.peers {arguments}".strip()


if __name__ == "__main__":
    main()
