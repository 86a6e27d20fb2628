"""Times steps of loaded layers on a device, for a profile: kinds of layers, and the tail.
Loads nothing and stores nothing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.stage.attention.paged_kv import Span
from services.stage.device.device import Device
from services.stage.engine.executor import Executor
from services.stage.engine.shard_runner import Pass
from services.stage.engine.step_graphs import Recorder
from services.stage.ranks.messages import PassKind
from shardline.base.clock import monotonic_s
from shardline.contract.job import SamplingParams
from shardline_costs import LayerTimes, ModelCosts
from shardline_costs.device_profile import Points
from shardline_scheduler.kv_blocks import BLOCK_TOKENS, blocks_for
from shardline_scheduler.step_plan import Open, Row, StepPlan

ROWS = (1, 8, 32, 64, 128, 256, 512, 1024)
"""Packed rows of the steps that are timed, up to the token budget."""
SAMPLED = (1, 8, 32, 64)
# of layers, whatever a busy machine measures: no plan can be made of those that take no time
LEAST_S = 1e-7
DECODES = 32
"""Sequences of the steps that tell what a token of context costs."""
CONTEXT = 8 * BLOCK_TOKENS - 1
"""Tokens before each of their rows."""
CHUNKS_BEFORE = 4
"""Whole chunks before the one that tells what a prompt's row pays for each token of context."""
POINT_S = 0.15
"""Time for one figure, in which three runs are made at least."""
MIN_RUNS = 3
SLOW_S = 1.0
"""A run that takes longer, once warm, is timed once: a slow device must not cost minutes."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Times runs on one device."""

    device: Device

    def seconds(self, run: Callable[[], object]) -> float:
        """Returns the lower quartile of runs after a first one: other users only add."""
        run()  # not timed: it may compile kernels
        times = [self._once_s(run)]
        if times[0] > SLOW_S:
            return times[0]
        end_s = monotonic_s() + POINT_S
        while len(times) < MIN_RUNS or monotonic_s() < end_s:
            times.append(self._once_s(run))
        return statistics.quantiles(times)[0]

    def _once_s(self, run: Callable[[], object]) -> float:
        self.device.synchronize()
        began_s = monotonic_s()
        run()
        self.device.synchronize()
        return monotonic_s() - began_s


class FirstLayers:
    """Times steps of a shard that holds the embedding and some first layers."""

    def __init__(
        self, executor: Executor, model: ModelCosts, clock: Clock, recorder: Recorder | None = None
    ) -> None:
        """`recorder`: records steps as graphs, so that they are timed as they will run."""
        self._executor = executor
        self._clock = clock
        self._recorder = recorder
        self._budget = executor.token_budget
        self._num_blocks = executor.num_blocks
        self._most_sequences = executor.num_states or executor.token_budget
        self._kinds: dict[str, list[int]] = {}
        for number in executor.layers:
            self._kinds.setdefault(model.layers[number].name, []).append(number)

    def measure(self) -> tuple[dict[str, LayerTimes], Points]:
        """Returns the times of each kind of layer, and those of a step without layers, by packed
        rows."""
        num_rows = [rows for rows in ROWS if rows < self._budget] + [self._budget]
        by_rows = {rows: self._parts(self._decodes(rows, before=0)) for rows in num_rows}
        most = min(self._most_sequences, self._num_blocks // blocks_for(CONTEXT + 1))
        decodes = min(DECODES, self._budget, most)
        short, long = (
            self._parts(self._decodes(decodes, before=before)) for before in (0, CONTEXT)
        )
        chunk = self._budget
        before = CHUNKS_BEFORE * self._budget
        early, late = (self._parts(_chunk(start, chunk)) for start in (0, before))
        layers = {
            kind: LayerTimes(
                rows=tuple((rows, parts[kind]) for rows, parts in by_rows.items()),
                decode_context_s=max(0.0, long[kind] - short[kind]) / (decodes * CONTEXT),
                prefill_context_s=max(0.0, late[kind] - early[kind]) / (chunk * before),
            )
            for kind in self._kinds
        }
        return layers, tuple((rows, parts[""]) for rows, parts in by_rows.items())

    def _decodes(self, num_rows: int, before: int) -> list[Span]:
        """Returns one row of each of `num_rows` sequences, with `before` tokens before it; more
        rows of each where there are not as many states."""
        sequences = min(num_rows, self._most_sequences)
        own, left = divmod(num_rows, sequences)
        lengths = [own + (index < left) for index in range(sequences)]
        num = blocks_for(before + max(lengths))
        return [
            Span(start=before, length=length, blocks=_blocks(index, num), state=index)
            for index, length in enumerate(lengths)
        ]

    def _parts(self, spans: Sequence[Span]) -> dict[str, float]:
        """Seconds of one layer of each kind, and under "" those of the step without layers."""
        whole_s = self._seconds(spans, ())
        saved = {
            kind: max(LEAST_S, whole_s - self._seconds(spans, layers))
            for kind, layers in self._kinds.items()
        }
        parts = {kind: saved_s / len(self._kinds[kind]) for kind, saved_s in saved.items()}
        return {**parts, "": max(0.0, whole_s - sum(saved.values()))}

    def _seconds(self, spans: Sequence[Span], left_out: Iterable[int]) -> float:
        """Returns the time of a step without these layers."""
        x = _inputs(self._executor, spans)
        if self._recorder is not None:
            forward = self._executor.forward
            with forward.shard.without(left_out):
                replay = forward.recorded(self._recorder, spans, x)
            return self._clock.seconds(replay)
        what = Pass(kind=PassKind.HIDDEN, spans=spans, left_out=tuple(left_out))
        return self._clock.seconds(lambda: self._executor.run_pass(what, x))


class Tail:
    """Times what output layer and sampler add to a step of the last layer."""

    def __init__(self, executor: Executor, clock: Clock) -> None:
        self._executor = executor
        self._clock = clock

    def measure(self) -> tuple[Points, float]:
        """Returns the seconds that sampled rows add, by their number, and those that a prompt's row
        adds, which may be below 0: the last layer leaves out most of what is not sampled. Noise
        below 0 counts as 0."""
        budget = self._executor.token_budget
        most = self._executor.num_states or budget
        fitting = [rows for rows in SAMPLED if rows <= min(budget, most)]
        added = {rows: self._added_s(rows, length=1) for rows in fitting}
        sampled = tuple((rows, max(0.0, added_s)) for rows, added_s in added.items())
        return sampled, (self._added_s(1, length=budget) - added[1]) / budget

    def _added_s(self, sequences: int, length: int) -> float:
        """Returns the time of a step that samples after the last row of each sequence."""
        executor = self._executor
        num = blocks_for(length)
        blocks = [_blocks(index, num) for index in range(sequences)]
        opened = tuple(
            Open(
                seq=index,
                ids=(0,) * length,
                num_prompt=length,
                params=SamplingParams(),
                seed=0,
                num_blocks=num,
                state=index,
            )
            for index in range(sequences)
        )
        rows = tuple(
            Row(index, 0, length, (), tuple(own), True) for index, own in enumerate(blocks)
        )
        plan = StepPlan(0, opened, rows, tuple(range(sequences)))
        spans = [
            Span(start=0, length=length, blocks=own, state=index)
            for index, own in enumerate(blocks)
        ]
        x = _inputs(executor, spans)
        whole_s = self._clock.seconds(lambda: executor.run(plan, x))
        hidden = Pass(kind=PassKind.HIDDEN, spans=spans)
        return whole_s - self._clock.seconds(lambda: executor.run_pass(hidden, x))


def _inputs(executor: Executor, spans: Sequence[Span]) -> Tensor:
    num_rows = sum(span.length for span in spans)
    return executor.forward.random_inputs(num_rows, torch.Generator().manual_seed(0))


def _chunk(start: int, length: int) -> list[Span]:
    """Rows of one prompt."""
    blocks = _blocks(0, blocks_for(start + length))
    return [Span(start=start, length=length, blocks=blocks, state=0)]


def _blocks(index: int, num: int) -> list[int]:
    """Those of one sequence: no two read the same KV, which a cache would hold."""
    return list(range(index * num, (index + 1) * num))
