"""Which engine is asked what, in which precision, and in which order. Knows no process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.benchmarks.peers.llamacpp import LlamaCpp
from tests.benchmarks.peers.openvino import OpenVino
from tests.benchmarks.peers.peer import Peer
from tests.benchmarks.peers.shardline import Shardline
from tests.benchmarks.peers.vllm import Vllm
from tests.benchmarks.peers.workloads import RATES

OURS = "shardline"
SLOW = 1.5
"""An engine that took this many times as long as the fastest in the first round is not asked
again."""

TRACES = tuple(f"poisson-{rate:g}" for rate in RATES)
AT_ONCE = ("W", "long", "short", "common", "alone")
BASIC = ("W", "alone")

PLAN: dict[str, dict[str, tuple[str, ...]]] = {
    "bf16": {
        OURS: AT_ONCE + TRACES,
        "shardline-chain": BASIC,
        "openvino": AT_ONCE + TRACES,
        "vllm": AT_ONCE + TRACES,
        "llamacpp": BASIC,
    },
    "fp32": {OURS: BASIC, "openvino": BASIC, "vllm": BASIC},
    "int8": {OURS: AT_ONCE, "openvino": AT_ONCE, "llamacpp": ("W", "long", "alone")},
}
"""Workloads of every engine, by precision. llama.cpp is asked less: minutes each, and it is not
near the others."""


def peers() -> dict[str, Peer]:
    """All of them by name, ours first."""
    every: tuple[Peer, ...] = (
        Shardline(OURS),
        Shardline("shardline-chain"),
        OpenVino(),
        Vllm(),
        LlamaCpp(),
    )
    return {peer.name: peer for peer in every}


@dataclass(slots=True)
class Schedule:
    """The runs of one precision: all engines in turn on one workload, then the next; each round
    begins with another."""

    engines: Sequence[str]
    workloads: dict[str, tuple[str, ...]]
    walls_s: dict[tuple[str, str], float] = field(default_factory=dict)
    dropped: set[tuple[str, str]] = field(default_factory=set)

    def note(self, workload: str, engine: str, wall_s: float) -> None:
        """How long a run of the first round took."""
        self.walls_s.setdefault((workload, engine), wall_s)

    def drop(self, what: str | tuple[str, str]) -> None:
        """Asks an engine no more, or no more for one workload."""
        if isinstance(what, str):
            self.engines = [engine for engine in self.engines if engine != what]
        else:
            self.dropped.add(what)

    def round(self, number: int, chosen: Iterable[str]) -> Iterable[tuple[str, str]]:
        """(workload, engine) in order; traces are run once. It is read while runs are noted."""
        for workload in chosen:
            if number > 0 and workload in TRACES:
                continue
            turn = number % max(1, len(self.engines))
            for engine in (*self.engines[turn:], *self.engines[:turn]):
                if self._is_asked(workload, engine):
                    yield workload, engine

    def _is_asked(self, workload: str, engine: str) -> bool:
        is_planned = engine in self.engines and workload in self.workloads[engine]
        return (
            is_planned
            and (workload, engine) not in self.dropped
            and not self._is_slow(workload, engine)
        )

    def _is_slow(self, workload: str, engine: str) -> bool:
        known = [wall_s for (name, _), wall_s in self.walls_s.items() if name == workload]
        mine = self.walls_s.get((workload, engine))
        return mine is not None and mine > SLOW * min(known)
