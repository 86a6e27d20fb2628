"""The hot loop of a head: schedules, runs its own layers, sends the step down the chain and applies
the tail's answers. A one-stage pipeline is the head alone, without hops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import structlog
from torch import Tensor

from services.stage.engine.engine import IDLE_WAIT_S, Engine, OnLost, OnStep, ignore_step
from services.stage.engine.executor import Executor
from services.stage.engine.step_clock import StepMoments
from services.stage.hop import Receiver
from services.stage.hop.wiring import Wiring
from shardline.base.clock import lease_clock_s, monotonic_s
from shardline.contract.job import FinishReason
from shardline_scheduler.events import Event
from shardline_scheduler.offload import OffloadTerms
from shardline_scheduler.scheduler import Scheduler
from shardline_scheduler.sequence import Key, Request, TokenSink
from shardline_scheduler.step_plan import StepPlan, StepResult, decode_result, encode
from shardline_scheduler.step_times import StepTime

log = structlog.get_logger(__name__)


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
        on_step: OnStep = ignore_step,
    ) -> None:
        super().__init__(executor, on_lost=on_lost, on_step=on_step)
        self.scheduler = scheduler
        self._may_run_until_s = float("inf")
        """Self-fencing, by the lease clock: after this moment nothing is scheduled and nothing is
        emitted."""
        self.is_fenced = False
        """Whether that moment has passed and holds the loop back."""
        self._emit = emit

    @property
    def num_awaited(self) -> int:
        """The number of steps with answers due. It is 0 while the loop is held back: answers may
        wait then."""
        return 0 if self.is_fenced else self.scheduler.num_in_flight

    @property
    def epoch(self) -> int:
        """The epoch that it is wired for, or was last."""
        return self.progress.epoch

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
        self.clock.restart_idle()
        config = self.scheduler.config
        if wiring.num_states and config.prompt_lookup:
            log.info("no prompt lookup", reason="a recurrent state is not taken back")
        offload = OffloadTerms(num_slots=wiring.num_slots, move_s=wiring.move_s)
        self.scheduler.config = replace(config, num_stages=wiring.num_stages)
        self._emit(
            self.scheduler.rebuild(
                wiring.num_blocks,
                wiring.first_lanes or wiring.num_lanes,
                offload,
                wiring.num_states,
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
        idle_us = self.clock.idle_us(now_s) if self.scheduler.num_in_flight <= 1 else 0
        return msgspec.structs.replace(plan, idle_us=idle_us) if idle_us else plan

    def _launch(self, plan: StepPlan, began_s: float) -> None:
        plan = self.executor.admit(plan)
        out = self._run_step(plan, None)
        if isinstance(out, Tensor):
            self._pass_on(plan, encode(plan), out, began_s)
            return
        self._apply(out)
        self._finish_step(plan, self.clock.moments(began_s))

    def _finish_step(self, plan: StepPlan, moments: StepMoments) -> StepTime:
        time = super()._finish_step(plan, moments)
        if plan.rows and not plan.moves:
            self.scheduler.step_cost.learn(plan.num_tokens, time.compute_s)
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
            self.clock.note_idle()
