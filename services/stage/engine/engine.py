"""The resident engine: what every stage's hot loop shares, and that of a later stage. Owns its
thread; knows no Celery, Redis or SQL.

A later stage receives, runs its layers and passes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import structlog
from torch import Tensor

from services.stage.engine.executor import Executor
from services.stage.engine.inbox import Inbox
from services.stage.engine.launched_steps import LaunchedStep, LaunchedSteps
from services.stage.engine.step_clock import StepClock, StepMoments
from services.stage.engine.tensors import name_of, quantized, tensor_of, view_of
from services.stage.hop import Frame, Kind
from services.stage.hop.frame import Buffer
from services.stage.hop.wiring import Wiring
from shardline.base.clock import monotonic_s
from shardline.base.errors import LinkLost, ProtocolError
from shardline_scheduler.step_plan import StepPlan, StepResult, decode_plan, encode
from shardline_scheduler.step_times import EngineProgress, StepTime
from shardline_server import failpoints
from shardline_server.failpoints import Point, failpoint

log = structlog.get_logger(__name__)

IDLE_WAIT_S = 0.5
"""A wait for work ends at least this often; every real event wakes the engine at once."""


Output = Tensor | StepResult
"""Activations for the next stage; of the tail, its answer."""

OnLost = Callable[[int, str], None]
"""Called with (epoch, reason) in the engine's thread when that epoch is over."""

OnStep = Callable[[StepPlan, StepTime], None]
"""Called in the engine's thread after every step, when its frame has left."""


def ignore_step(_plan: StepPlan, _time: StepTime) -> None:
    """The OnStep of an engine without metrics."""


class Engine(threading.Thread):
    """What head and followers share: the inbox, the wiring of the current epoch, and counters for
    other threads."""

    def __init__(
        self,
        executor: Executor,
        *,
        on_lost: OnLost,
        on_step: OnStep = ignore_step,
        name: str = "engine",
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.executor = executor
        self.inbox = Inbox()
        self.progress = EngineProgress(epoch=-1)
        self.clock = StepClock()
        self._on_lost = on_lost
        self._on_step = on_step
        self._wiring: Wiring | None = None
        self._launched: LaunchedSteps | None = None
        """Of an epoch on an accelerator with pinned memory. Without one a step is computed when
        `run` returns."""
        self._running = True

    def wire(self, wiring: Wiring) -> None:
        """Starts a new epoch and drops all KV. May be called from any thread."""
        self.inbox.put(lambda: self._rewire(wiring))

    def unwire(self) -> None:
        """Ends the epoch. May be called from any thread."""
        self.inbox.put(self._unwire)

    def stop(self) -> None:
        """Ends the loop after the current step. May be called from any thread."""
        self.inbox.put(self._stop)

    def run(self) -> None:
        """Runs the loop in its thread. A fault of a link or a frame ends the epoch, never the
        process."""
        self.executor.enter_thread()
        while self._running:
            try:
                self.inbox.take()
                self._turn()
            except ProtocolError as error:
                self._lose(str(error))
        self._unwire()

    def _turn(self) -> None:
        raise NotImplementedError

    def _rewire(self, wiring: Wiring) -> None:
        self._unwire()
        self.progress = EngineProgress(epoch=wiring.epoch)
        self._wiring = wiring
        # At most num_lanes + 1 steps are in flight: before a buffer comes around, its step is back
        # at the head.
        staging = self.executor.staging(wiring.num_lanes + 1)
        if staging is not None:
            self._launched = LaunchedSteps(staging, self.inbox, self._leave)
            self._launched.start()
        self.inbox.wake_by(wiring.receiver.wake if wiring.receiver else None)

    def _unwire(self) -> None:
        self.inbox.wake_by(None)
        if self._launched is not None:
            self._launched.close()
            self._launched = None
            self.clock.stop()
        if self._wiring is not None:
            self._wiring.close()
            self._wiring = None
            self.executor.reset()

    def _stop(self) -> None:
        self._running = False

    def _lose(self, reason: str) -> None:
        log.warning("epoch lost", reason=reason, epoch=self.progress.epoch)
        self.progress.error = reason
        self._unwire()
        self._on_lost(self.progress.epoch, reason)

    def _run_step(self, plan: StepPlan, hidden: Tensor | None) -> Output:
        with self.clock.computing():
            if failpoints.ARMED is not None:
                self._pass_failpoints(plan)
            return self.executor.run(plan, hidden)

    def _pass_failpoints(self, plan: StepPlan) -> None:
        """Gathers facts that no step outside of tests should pay for."""
        if plan.opens:
            failpoint(Point.MID_PREFILL, place=self._place, seed=[each.seed for each in plan.opens])
        if any(row.decodes for row in plan.rows):
            failpoint(Point.MID_DECODE, place=self._place)

    @property
    def _may_launch(self) -> bool:
        """Whether a step may be run now: on an accelerator one step ahead of the one that it
        computes."""
        return self._launched is None or not self._launched.is_full

    def _pass_on(self, plan: StepPlan, message: Buffer, out: Output, began_s: float) -> None:
        """Sends what a step gave: now, or, from an accelerator, once it is copied."""
        assert self._wiring is not None
        if self._wiring.sends_int8 and isinstance(out, Tensor):
            out = quantized(out)
        if self._launched is not None and isinstance(out, Tensor):
            states = out if plan.rows else None
            launched_s = self.clock.note_launch()
            self._launched.add(plan, message, states, began_s=began_s, launched_s=launched_s)
            return
        self._send(plan, message, out)
        self._finish_step(plan, self.clock.moments(began_s))

    def _leave(self, step: LaunchedStep) -> None:
        """Sends a step that is copied. If the device has the next one by then, the sending takes
        none of its time."""
        assert self._launched is not None
        computed_s = step.copy.wait()
        self._send(step.plan, step.message, step.copy.tensor)
        moments = self.clock.note_left(step, computed_s, following=self._launched.oldest)
        self._finish_step(step.plan, moments)

    def _send(self, plan: StepPlan, message: Buffer, out: Output | None) -> None:
        wiring = self._wiring
        assert wiring is not None
        assert wiring.sender is not None
        wiring.sender.send(_frame(wiring, plan, message, out))

    def _finish_step(self, plan: StepPlan, moments: StepMoments) -> StepTime:
        time = self.progress.finish(plan, *moments)
        self.clock.step_times.add(time)
        self._on_step(plan, time)
        return time

    @property
    def _place(self) -> int:
        return self._wiring.stage_index if self._wiring else 0


class FollowerEngine(Engine):
    """The loop of a middle or tail: receive a step, run it, pass on the activations or the tail's
    answer."""

    def _turn(self) -> None:
        wiring = self._wiring
        if wiring is None:
            self.inbox.wait(IDLE_WAIT_S)
            return
        if wiring.receiver is None or wiring.sender is None:
            raise LinkLost("a later stage needs both hops")
        if not self._may_launch:
            self.inbox.wait(IDLE_WAIT_S)
            return
        frame = wiring.receiver.receive(IDLE_WAIT_S)
        if frame is None:
            return
        began_s = monotonic_s()
        plan = decode_plan(frame.message)
        if plan.step != frame.step:
            raise ProtocolError(f"a plan of step {plan.step} in the frame of step {frame.step}")
        admitted = self.executor.admit(plan)
        message = frame.message if admitted is plan else encode(admitted)
        out = self._run_step(admitted, self._received(frame) if plan.rows else None)
        self._pass_on(admitted, message, out, began_s)

    def _received(self, frame: Frame) -> Tensor:
        buffer = None if self._launched is None else self._launched.buffer(frame.step)
        return tensor_of(frame, self.executor.dtype, buffer)


def _frame(
    wiring: Wiring, plan: StepPlan, message: Buffer, out: Tensor | StepResult | None
) -> Frame:
    """Returns the plan with its activations for the next stage, [T, H] of the stage's dtype or
    int8, or the tail's answer for the head."""
    of_step = partial(Frame, pipeline=wiring.pipeline, epoch=wiring.epoch, step=plan.step)
    if isinstance(out, StepResult):
        return of_step(kind=Kind.RESULT, message=encode(out))
    if out is None or not plan.rows:
        return of_step(kind=Kind.PLAN, message=message)
    return of_step(
        kind=Kind.PLAN,
        message=message,
        tensor=view_of(out),
        dtype=name_of(out.dtype),
        shape=tuple(out.shape),
    )
