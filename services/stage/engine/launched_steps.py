"""Steps of one epoch that an accelerator still computes or copies while the engine goes on. Owns
their order and the thread that waits for the device; knows no hop."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

from torch import Tensor

from services.stage.device.staging import HostCopy, Staging
from services.stage.engine.inbox import Inbox
from services.stage.hop.frame import Buffer
from shardline_scheduler.step_plan import StepPlan

MAX_STEPS = 2
"""One that the device computes and one behind it: more would only wait there, and their frames with
them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedStep:
    """A step that the device was given, and what leaves the stage once it is computed."""

    plan: StepPlan
    message: Buffer
    """The plan, encoded."""
    began_s: float
    """Its frame had come; on a head: scheduling began."""
    launched_s: float
    """The device was given it."""
    copy: HostCopy


class LaunchedSteps(threading.Thread):
    """Holds launched steps, oldest first, until `leave` has been called with each, in the engine's
    thread."""

    def __init__(
        self, staging: Staging, inbox: Inbox, leave: Callable[[LaunchedStep], None]
    ) -> None:
        super().__init__(name="device-copies", daemon=True)
        self._staging = staging
        self._inbox = inbox
        self._leave = leave
        self._steps: deque[LaunchedStep] = deque()
        self._awaited: SimpleQueue[LaunchedStep | None] = SimpleQueue()

    def __len__(self) -> int:
        """The number of steps that have not left."""
        return len(self._steps)

    @property
    def is_full(self) -> bool:
        """Whether no further step may be launched before one has left."""
        return len(self._steps) == MAX_STEPS

    @property
    def oldest(self) -> LaunchedStep | None:
        """The step that leaves next."""
        return self._steps[0] if self._steps else None

    def buffer(self, step: int) -> Tensor:
        """Returns the pinned buffer for the received activations of a step: uint8 [bytes]."""
        return self._staging.buffer(step)

    def add(
        self,
        plan: StepPlan,
        message: Buffer,
        states: Tensor | None,
        *,
        began_s: float,
        launched_s: float,
    ) -> None:
        """Takes a step that was launched; the activations that it gives, [T, H] of any dtype, are
        copied behind it."""
        assert not self.is_full
        copy = self._staging.copy_out(plan.step, states)
        step = LaunchedStep(
            plan=plan,
            message=message,
            began_s=began_s,
            launched_s=launched_s,
            copy=copy,
        )
        self._steps.append(step)
        self._awaited.put(step)

    def run(self) -> None:
        """Waits for each step and calls into the engine's thread, until the epoch is over."""
        while (step := self._awaited.get()) is not None:
            step.copy.wait()
            self._inbox.put(partial(self.let_leave, step.plan.step))

    def let_leave(self, step: int) -> None:
        """Lets all steps up to this one leave that have not, and waits for them. Called in the
        engine's thread."""
        while self._steps and self._steps[0].plan.step <= step:
            self._steps[0].copy.wait()
            self._leave(self._steps.popleft())

    def close(self) -> None:
        """Drops what has not left. What the device still reads or writes stays until it has
        ended."""
        self._steps.clear()
        self._awaited.put(None)
