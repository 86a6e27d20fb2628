"""The resident engine: the hot loops of a head and of the later stages. Owns its thread; knows no
Celery, Redis or SQL.

A head schedules, runs its own layers, sends the step down the chain and applies the tail's answers.
A later stage receives, runs its layers and passes on. A one-stage pipeline is the head alone,
without hops.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import structlog
from torch import Tensor

from services.stage.engine.executor import Executor
from services.stage.engine.inbox import Inbox
from services.stage.engine.launched_steps import LaunchedStep, LaunchedSteps
from services.stage.engine.step_frames import step_frame
from services.stage.engine.tensors import quantized, tensor_of
from services.stage.hop import Frame, Receiver
from services.stage.hop.frame import Buffer
from services.stage.hop.wiring import Wiring
from shardline.base import failpoints
from shardline.base.clock import lease_clock_s, monotonic_s
from shardline.base.errors import LinkLost, ProtocolError
from shardline.base.failpoints import Point, failpoint
from shardline.contract.job import FinishReason
from shardline_scheduler.events import Event
from shardline_scheduler.offload import OffloadTerms
from shardline_scheduler.scheduler import Scheduler
from shardline_scheduler.sequence import Key, Request, TokenSink
from shardline_scheduler.step_plan import StepPlan, StepResult, decode_plan, decode_result, encode
from shardline_scheduler.step_times import EngineProgress, StepTime, StepTimes

log = structlog.get_logger(__name__)

IDLE_WAIT_S = 0.5
"""A wait for work ends at least this often; every real event wakes the engine at once."""


Output = Tensor | StepResult
"""Activations for the next stage; of the tail, its answer."""

OnLost = Callable[[int, str], None]
"""Called with (epoch, reason) in the engine's thread when that epoch is over."""

OnStep = Callable[[StepPlan, StepTime], None]
"""Called in the engine's thread after every step, when its frame has left."""


def _ignore(_plan: StepPlan, _time: StepTime) -> None:
    """The OnStep of an engine without metrics."""


class Engine(threading.Thread):
    """What head and followers share: the inbox, the wiring of the current epoch, and counters for
    other threads."""

    def __init__(
        self,
        executor: Executor,
        *,
        on_lost: OnLost,
        on_step: OnStep = _ignore,
        name: str = "engine",
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.executor = executor
        self.inbox = Inbox()
        self.progress = EngineProgress(epoch=-1)
        self.step_times = StepTimes()
        self._on_lost = on_lost
        self._on_step = on_step
        self._wiring: Wiring | None = None
        self._launched: LaunchedSteps | None = None
        """Of an epoch on an accelerator with pinned memory. Without one a step is computed when
        `run` returns."""
        self.step_began_s: float | None = None
        """When the current step began, by `monotonic_s`, for other threads to read; None between
        steps."""
        self._computed = (0.0, 0.0)
        """When the executor's last run began and when it ended."""
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
            self.step_began_s = None
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
        began_s = self.step_began_s = monotonic_s()
        try:
            if failpoints.ARMED is not None:
                self._pass_failpoints(plan)
            out = self.executor.run(plan, hidden)
        finally:
            self.step_began_s = None
        self._computed = began_s, monotonic_s()
        return out

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
            self._launched.add(plan, message, states, began_s=began_s, launched_s=self._computed[0])
            self.step_began_s = self._computed[0]
            return
        self._send(plan, message, out)
        self._finish_step(plan, began_s, self._computed, monotonic_s())

    def _leave(self, step: LaunchedStep) -> None:
        """Sends a step that is copied. If the device has the next one by then, the sending takes
        none of its time."""
        assert self._launched is not None
        computed = step.launched_s, step.copy.wait()
        self._send(step.plan, step.message, step.copy.tensor)
        following = self._launched.oldest
        ended_s = max(computed[1], following.began_s) if following else monotonic_s()
        self.step_began_s = following.launched_s if following else None
        self._finish_step(step.plan, step.began_s, computed, ended_s)

    def _send(self, plan: StepPlan, message: Buffer, out: Output | None) -> None:
        wiring = self._wiring
        assert wiring is not None
        assert wiring.sender is not None
        wiring.sender.send(step_frame(wiring, plan, message, out))

    def _finish_step(
        self, plan: StepPlan, began_s: float, computed: tuple[float, float], ended_s: float
    ) -> StepTime:
        time = self.progress.finish(plan, began_s, *computed, ended_s)
        self.step_times.add(time)
        self._on_step(plan, time)
        return time

    @property
    def _place(self) -> int:
        return self._wiring.stage_index if self._wiring else 0


class HeadEngine(Engine):
    """The head's loop. `emit` receives events in order, in the engine's thread, and must not
    block."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        *,
        emit: Callable[[Sequence[Event]], None],
        on_lost: OnLost,
        on_step: OnStep = _ignore,
    ) -> None:
        super().__init__(executor, on_lost=on_lost, on_step=on_step)
        self.scheduler = scheduler
        self._may_run_until_s = float("inf")
        """Self-fencing, by the lease clock: after this moment nothing is scheduled and nothing is
        emitted."""
        self.is_fenced = False
        """Whether that moment has passed and holds the loop back."""
        self._idle_since_s: float | None = None
        """Since when no step is in flight; None before the first step of an epoch."""
        self._emit = emit

    @property
    def num_awaited(self) -> int:
        """The number of steps with answers due. It is 0 while the loop is held back: answers may
        wait then."""
        return 0 if self.is_fenced else self.scheduler.num_in_flight

    @property
    def num_steps(self) -> int:
        """The number of steps computed in this epoch."""
        return self.progress.num_steps

    def extend_lease(self, until_s: float) -> None:
        """Lets the loop schedule and emit until this moment of the lease clock. May be called from
        any thread."""
        self._may_run_until_s = until_s

    def use_lanes(self, num_lanes: int) -> None:
        """Has `num_lanes` steps in flight from now on, at most those of the wiring. May be called
        from any thread."""
        self.inbox.put(lambda: self._use_lanes(num_lanes))

    def add(self, request: Request, sink: TokenSink) -> None:
        """Adds a claimed job. May be called from any thread."""
        self.inbox.put(lambda: self._emit(self.scheduler.add(request, sink)))

    def end(self, key: Key, reason: FinishReason) -> None:
        """Ends a job with what it has; `emit` gets its Finished unless it has ended. May be called
        from any thread."""
        self.inbox.put(lambda: self._end(key, reason))

    def begin(self, key: Key) -> None:
        """Lets a parked job run. May be called from any thread."""
        self.inbox.put(lambda: self.scheduler.begin(key))

    def release(self, key: Key) -> None:
        """Tells that a quarantined job's tokens are saved, so that the next may run. May be called
        from any thread."""
        self.inbox.put(lambda: self.scheduler.release(key))

    def forget(self, key: Key) -> None:
        """Drops a job without an event; the next plan frees its KV on every stage. May be called
        from any thread."""
        self.inbox.put(lambda: self._forget(key))

    def _unwire(self) -> None:
        was_wired = self._wiring is not None
        super()._unwire()
        if was_wired:
            # Now, not with the next wiring: a new epoch may take longer than the leases last.
            self._emit(self.scheduler.rebuild(self.scheduler.config.num_blocks))

    def _rewire(self, wiring: Wiring) -> None:
        super()._rewire(wiring)
        self._idle_since_s = None
        offload = OffloadTerms(num_slots=wiring.num_slots, move_s=wiring.move_s)
        self._emit(
            self.scheduler.rebuild(
                wiring.num_blocks, wiring.first_lanes or wiring.num_lanes, offload
            )
        )

    def _use_lanes(self, num_lanes: int) -> None:
        self.scheduler.config = replace(self.scheduler.config, num_lanes=num_lanes)

    def _forget(self, key: Key) -> None:
        self.scheduler.abort(key)

    def _end(self, key: Key, reason: FinishReason) -> None:
        finished = self.scheduler.abort(key, reason)
        if finished is not None:
            self._emit([finished])

    def _turn(self) -> None:
        wiring = self._wiring
        self.is_fenced = lease_clock_s() >= self._may_run_until_s
        if wiring is None or self.is_fenced:
            self.inbox.wait(IDLE_WAIT_S)
            return
        began_s = monotonic_s()
        plan = self.scheduler.schedule() if self._may_launch else None
        self._emit(self.scheduler.may_begin())
        if plan is not None:
            self._launch(self._after_idle(plan, began_s), began_s)
        if wiring.receiver is not None:
            self._collect(wiring.receiver, wait_s=0.0 if plan is not None else IDLE_WAIT_S)
        elif plan is None:
            self.inbox.wait(IDLE_WAIT_S)

    def _after_idle(self, plan: StepPlan, now_s: float) -> StepPlan:
        """The plan, which tells later stages how long no step was in flight before it."""
        if self._idle_since_s is None or self.scheduler.num_in_flight > 1:
            return plan
        return msgspec.structs.replace(
            plan, idle_us=max(0, int((now_s - self._idle_since_s) * 1e6))
        )

    def _launch(self, plan: StepPlan, began_s: float) -> None:
        plan = self.executor.admit(plan)
        out = self._run_step(plan, None)
        if isinstance(out, Tensor):
            self._pass_on(plan, encode(plan), out, began_s)
            return
        self._apply(out)
        self._finish_step(plan, began_s, self._computed, monotonic_s())

    def _finish_step(
        self, plan: StepPlan, began_s: float, computed: tuple[float, float], ended_s: float
    ) -> StepTime:
        time = super()._finish_step(plan, began_s, computed, ended_s)
        if plan.rows and not plan.moves:
            self.scheduler.recompute_cost.learn(plan.num_tokens, time.compute_s)
        return time

    def _collect(self, receiver: Receiver, wait_s: float) -> None:
        while (frame := receiver.receive(wait_s)) is not None:
            began_s = monotonic_s()
            self._apply(decode_result(frame.message))
            if not self._launched:  # during a computation it takes no time of this stage
                self.progress.work(monotonic_s() - began_s)
            wait_s = 0.0

    def _apply(self, result: StepResult) -> None:
        self._emit(self.scheduler.apply(result))
        if self.scheduler.num_in_flight == 0:
            self._idle_since_s = monotonic_s()


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
