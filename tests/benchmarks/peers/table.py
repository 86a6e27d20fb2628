"""Quality and speed of each dtype on a real model, beside llama.cpp on the same GGUF files and
OpenVINO, in one run.

    python -m tests.benchmarks.peers.table [--dtype fp32 int8 int4] [--engine shardline llamacpp]
    [--runs 3] [--windows 0] [--quick]

The model is SmolLM2-135M-Instruct (`make real-model`). Every engine reads the same windows of 256
tokens of three texts: perplexity of each, and over all of them the share of equal likeliest tokens
(same top-1) and the divergence (KL) beside Shardline's float32. Then each serves W and one request
alone: rates and waits are medians of the rounds, with one engine at work at a time. Where the
processor computes no bfloat16, that dtype is emulated and slow: leave it out with --dtype.

The model's weights were published in 4 bits with a minimum for 32 inputs (Q4_1), so formats of that
kind lose less here than on other models; Q4_0 has no minimum. Compare engines on the same file.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tests.benchmarks.peers.llamacpp import FORMATS, LlamaCpp
from tests.benchmarks.peers.machine import describe
from tests.benchmarks.peers.measure import Figures, Unfair
from tests.benchmarks.peers.openvino import OpenVino
from tests.benchmarks.peers.peer import PEERS, LogitsPeer, Unavailable
from tests.benchmarks.peers.plan import OURS
from tests.benchmarks.peers.readings import Agreement, Score, Window, windows
from tests.benchmarks.peers.report import table
from tests.benchmarks.peers.resident import Resident
from tests.benchmarks.peers.session import say, warm_up
from tests.benchmarks.peers.shardline import Shardline
from tests.benchmarks.peers.workloads import shapes
from tests.real_model import FOLDER, fetch

DTYPES = ("fp32", "bf16", "int8", "int4")
REFERENCE = "Shardline"
"""Its float32 is what others are compared with."""
QUICK_WINDOWS = 4
WORKLOADS = ("W", "alone")
KEPT = PEERS / "table.json"


@dataclass(slots=True, kw_only=True)
class Row:
    """An engine with one dtype, and what was found of it."""

    dtype: str
    engine: str
    scores: dict[str, Score] = field(default_factory=dict)
    """By text."""
    weight_bytes: int = 0
    runs: dict[str, list[Figures]] = field(default_factory=dict)
    """By workload."""
    skipped: str = ""
    """Why the rest is missing."""

    @property
    def name(self) -> str:
        """As progress and logs have it."""
        return f"{self.engine} {self.dtype}"

    def cells(self, texts: Sequence[str]) -> list[str]:
        """One line of the table; what is missing is empty."""
        known = self.scores
        near = Agreement.of(list(known.values())) if known else None
        served = {name: Figures.median(runs) for name, runs in self.runs.items() if runs}
        rate, alone = served.get("W"), served.get("alone")
        return [
            f"{self.dtype}, {self.engine}",
            *(
                f"{self.scores[text].perplexity:.3f}" if text in self.scores else ""
                for text in texts
            ),
            f"{near.same:.3f}" if near else "",
            f"{near.divergence:.4f}" if near else "",
            f"{self.weight_bytes / 2**20:.0f}" if self.weight_bytes else "",
            f"{rate.tokens_per_s:.0f}" if rate else "",
            f"{alone.ttft_p50_ms:.0f}" if alone else "",
            f"{alone.itl_p50_ms:.1f}" if alone else "",
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """`rows` in order, each with its peer; the first is float32, with which others are compared."""

    rows: Sequence[tuple[Row, LogitsPeer]]
    texts: dict[str, list[Window]]
    dtypes: Sequence[str]
    """Those whose rows also serve."""
    rounds: int
    quick: bool
    versions: dict[str, str] = field(default_factory=dict)
    keep: Callable[[], None]
    """Called after every row."""

    def run(self, folder: Path) -> None:
        """Everything. `folder` is for logits."""
        for row, peer in self.rows:
            say(f"{row.name}: install, convert")
            self._try(row, partial(_provide, peer, row.dtype))
        for row, peer in self.rows:
            self._try(row, partial(self._read, row, peer, folder))
            if self.rows[0][0].skipped:
                return
        for dtype in self.dtypes:
            self._serve([(row, peer) for row, peer in self.rows if row.dtype == dtype])

    def _try(self, row: Row, step: Callable[[], None]) -> None:
        """One step of a row that no earlier one has ended."""
        if row.skipped:
            return
        try:
            step()
        except (Unavailable, Unfair) as reason:
            row.skipped = str(reason)
            say(f"skipped {row.name}: {reason}")
        self.keep()

    def _read(self, row: Row, peer: LogitsPeer, folder: Path) -> None:
        resident = Resident(row.name, peer.reader(row.dtype), PEERS / f"{row.name}-logits.log")
        try:
            self.versions.update(resident.versions)
            row.weight_bytes = resident.weight_bytes
            for text, each in self.texts.items():
                score = Score()
                for number, ids in enumerate(each):
                    resident.read(ids, folder / "logits")
                    logits = _logits(folder / "logits", ids)
                    exact = folder / f"{text}-{number}"
                    if row is self.rows[0][0]:
                        torch.log_softmax(logits, -1).numpy().tofile(exact)
                    score.add(logits, _logits(exact, ids), ids)
                row.scores[text] = score
                say(f"{row.name}: {text}, perplexity {score.perplexity:.3f}")
        finally:
            resident.close()

    def _serve(self, rows: Sequence[tuple[Row, LogitsPeer]]) -> None:
        """W and one request alone by all engines of a dtype in turn, each round from another on."""
        known = shapes(quick=self.quick)
        chosen = {name: known[name] for name in WORKLOADS}
        residents: list[tuple[Row, Resident]] = []
        with ExitStack() as stack:

            def load(row: Row, peer: LogitsPeer) -> None:
                say(f"{row.name}: load")
                log = PEERS / f"{row.name}.log"
                resident = Resident(row.name, peer.command(row.dtype), log)
                stack.callback(resident.close)
                self.versions.update(resident.versions)
                resident.run(warm_up(chosen))
                residents.append((row, resident))

            def serve(row: Row, resident: Resident, name: str, number: int) -> None:
                figures = Figures.of(resident.run(chosen[name].work(1 + number)))
                row.runs.setdefault(name, []).append(figures)
                place = f"{number + 1}/{self.rounds} {row.name} {name}"
                say(f"{place}: {figures.tokens_per_s:.1f} tokens/s")

            for row, peer in rows:
                self._try(row, partial(load, row, peer))
            for number in range(self.rounds):
                turn = number % max(1, len(residents))
                for name in chosen:
                    for row, resident in (*residents[turn:], *residents[:turn]):
                        self._try(row, partial(serve, row, resident, name, number))


def peers_of(dtype: str) -> dict[str, dict[str, LogitsPeer]]:
    """Who computes in this dtype, by names of `--engine` and of rows. A file of ours is read by
    llama.cpp too."""
    llamacpp = LlamaCpp(lambda _: FOLDER)
    kind = FORMATS[dtype].name
    ours: dict[str, LogitsPeer] = {REFERENCE: Shardline(OURS, lambda _: FOLDER)}
    if dtype.startswith("int"):
        ours[f"Shardline, {kind} file"] = Shardline(OURS, llamacpp.file)
    return {
        "shardline": ours,
        "llamacpp": {f"llama.cpp, {kind} file": llamacpp},
        "openvino": {"OpenVINO GenAI": OpenVino(lambda _: FOLDER)},
    }


def markdown(rows: Sequence[Row], texts: Sequence[str]) -> str:
    """The table, and reasons of what is missing."""
    named = [f"perplexity, {text}" for text in texts]
    near = ("same top-1", "KL", "weights, MiB")
    head = [*named, *near, "W, tokens/s", "first token, ms", "between tokens, ms"]
    lines = [f"- {row.name}: {row.skipped}" for row in rows if row.skipped]
    found = table(["dtype, engine", *head], [row.cells(texts) for row in rows])
    return "\n".join([found, "", *lines]).rstrip()


def main() -> None:
    """Prints progress, then the table."""
    options = _parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if not FOLDER.is_dir():
        fetch()
    pairs = [
        (Row(dtype=dtype, engine=engine), peer)
        for dtype in DTYPES
        for name, peers in peers_of(dtype).items()
        for engine, peer in peers.items()
        if (dtype in options.dtype and name in options.engine)
        or (dtype, engine) == (DTYPES[0], REFERENCE)
    ]
    rows = [row for row, _ in pairs]
    limit = options.windows or (QUICK_WINDOWS if options.quick else 0)
    PEERS.mkdir(parents=True, exist_ok=True)
    contest = Contest(
        rows=pairs,
        texts=windows(FOLDER / "tokenizer.json", limit),
        dtypes=[dtype for dtype in DTYPES if dtype in options.dtype],
        rounds=1 if options.quick else options.runs,
        quick=options.quick,
        keep=lambda: _keep(rows),
    )
    with tempfile.TemporaryDirectory(dir=PEERS) as folder:
        contest.run(Path(folder))
    machine = describe() | contest.versions | {"command": " ".join(sys.argv[1:])}
    print(f"\n{', '.join(f'{name}: {value}' for name, value in machine.items())}\n")
    print(markdown(rows, list(contest.texts)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    engines = tuple(peers_of(DTYPES[0]))
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--engine", nargs="+", choices=engines, default=engines)
    parser.add_argument("--runs", type=int, default=3, help="rounds of W and one request alone")
    parser.add_argument("--windows", type=int, default=0, help="of each text; 0: all")
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_WINDOWS} windows, an eighth of W, one round"
    )
    return parser


def _provide(peer: LogitsPeer, dtype: str) -> None:
    peer.install()
    peer.convert(dtype)


def _logits(path: Path, ids: Window) -> Tensor:
    """float32 [ids, vocabulary]."""
    return torch.from_numpy(np.fromfile(path, np.float32).reshape(len(ids), -1))


def _keep(rows: Sequence[Row]) -> None:
    KEPT.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
