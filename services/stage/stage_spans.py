"""A stage's spans in the traces of jobs: from a sequence's first step in this stage to its last.
Knows no row.

The engine's thread calls it after each step. It keeps one entry for each open sequence that is
traced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.stage.metrics import StageMeter
from services.stage.runtime import LoadedStage
from shardline_scheduler.step_plan import Open, StepPlan
from shardline_scheduler.step_times import StepTime
from shardline_server import genai
from shardline_server.tracing import JobTrace, TracedPhase, Tracer, Value, parse_traceparent


@dataclass(slots=True, kw_only=True)
class OpenSpan:
    """A sequence that is not closed yet; times are of whole steps, which it shares with others."""

    trace: JobTrace
    began_s: float
    ended_s: float
    num_steps: int = 0
    compute_s: float = 0.0
    hop_s: float = 0.0

    def add(self, time: StepTime) -> None:
        """It had rows in this step."""
        self.num_steps += 1
        self.ended_s = time.ended_s
        self.compute_s += time.compute_s
        self.hop_s += time.hop_s


class StageSpans:
    """Records the spans of one stage; `about` tells which."""

    def __init__(self, tracer: Tracer, about: dict[str, Value]) -> None:
        self._tracer = tracer
        self._about = about
        self._epoch = 0
        self._open: dict[int, OpenSpan] = {}

    def step(self, plan: StepPlan, time: StepTime) -> None:
        """Records a step that has ended."""
        if time.epoch != self._epoch:
            self._end(list(self._open))  # The pipeline broke under them.
            self._epoch = time.epoch
        for opened in plan.opens:
            self._begin(opened, time)
        if self._open:
            for row in plan.rows:
                if (span := self._open.get(row.seq)) is not None:
                    span.add(time)
            self._end(plan.closes)

    def _begin(self, opened: Open, time: StepTime) -> None:
        trace = parse_traceparent(opened.trace) if opened.trace else None
        if trace is not None and self._tracer.is_on:
            self._open[opened.seq] = OpenSpan(
                trace=trace, began_s=time.began_s, ended_s=time.ended_s
            )

    def _end(self, numbers: tuple[int, ...] | list[int]) -> None:
        for number in numbers:
            span = self._open.pop(number, None)
            if span is not None:
                about = {
                    **self._about,
                    genai.STEPS: span.num_steps,
                    genai.COMPUTE_S: round(span.compute_s, 6),
                    genai.HOP_S: round(span.hop_s, 6),
                }
                phase = TracedPhase(
                    name="stage", began_s=span.began_s, ended_s=span.ended_s, attributes=about
                )
                self._tracer.phase(span.trace, phase)


def step_observer(
    loaded: LoadedStage, meter: StageMeter, tracer: Tracer
) -> Callable[[StepPlan, StepTime], None]:
    """What an engine calls after each step: the meter, and the spans if anybody wants them."""
    if not tracer.is_on:
        return meter.step
    about: dict[str, Value] = {
        genai.WORKER: loaded.worker,
        genai.LAYERS: f"{loaded.layers.start}-{loaded.layers.stop - 1}",
        genai.DEVICE: loaded.device.name,
    }
    spans = StageSpans(tracer, about)

    def observe(plan: StepPlan, time: StepTime) -> None:
        meter.step(plan, time)
        spans.step(plan, time)

    return observe
