"""The moments of an engine's steps, by `monotonic_s`. Knows no hop and counts nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from services.stage.engine.launched_steps import LaunchedStep
from shardline.base.clock import monotonic_s
from shardline_scheduler.step_times import StepTimes


class StepMoments(NamedTuple):
    """When one step passed what its StepTime tells."""

    began_s: float
    compute_began_s: float
    computed_s: float
    ended_s: float


class StepClock:
    """The engine's thread writes it."""

    def __init__(self) -> None:
        self.step_times = StepTimes()
        """Other threads may read them."""
        self.step_began_s: float | None = None
        """When the step that is computed now began, for other threads to read; None between
        steps."""
        self._run_began_s = 0.0
        self._run_ended_s = 0.0
        """Of the executor's last run."""
        self._idle_since_s: float | None = None

    @contextmanager
    def computing(self) -> Iterator[None]:
        """A context in which the executor runs a step."""
        self.step_began_s = self._run_began_s = monotonic_s()
        try:
            yield
        finally:
            self.step_began_s = None
            self._run_ended_s = monotonic_s()

    def moments(self, began_s: float) -> StepMoments:
        """Returns those of the step that the executor ran last, which ends now."""
        return StepMoments(began_s, self._run_began_s, self._run_ended_s, monotonic_s())

    def note_launch(self) -> float:
        """Returns when the last run began: the device still computes its step, if it has no
        earlier one."""
        self.step_began_s = self._run_began_s
        return self._run_began_s

    def note_left(
        self,
        step: LaunchedStep,
        computed_s: float,
        *,
        following: LaunchedStep | None,
    ) -> StepMoments:
        """Returns those of a launched step that has left; the device computes `following` now. If
        it had that one by then, the sending takes none of its time."""
        ended_s = max(computed_s, following.began_s) if following else monotonic_s()
        self.step_began_s = following.launched_s if following else None
        return StepMoments(step.began_s, step.launched_s, computed_s, ended_s)

    def stop(self) -> None:
        """Forgets the step that the device computes: its epoch is over."""
        self.step_began_s = None

    def note_idle(self) -> None:
        """No step of the pipeline is in flight from now on."""
        self._idle_since_s = monotonic_s()

    def restart_idle(self) -> None:
        """An epoch begins: the time before it is no idleness of the pipeline."""
        self._idle_since_s = None

    def idle_us(self, now_s: float) -> int:
        """Returns for how long no step has been in flight; 0 before the first of an epoch."""
        if self._idle_since_s is None:
            return 0
        return max(0, int((now_s - self._idle_since_s) * 1e6))
