"""Drift: how much slower or faster steps are than in the device's profile. Reads no clock, knows no
torch.

The engine's thread adds steps; another takes what has been found.
"""

from __future__ import annotations

import statistics
import threading
from collections import Counter

from shardline_costs import DeviceProfile, ModelCosts
from shardline_costs.step_cost import compute_s
from shardline_costs.workload import StepKind
from shardline_scheduler.step_plan import StepPlan

WINDOW_S = 10.0
"""Of computing, by which steps are compared together."""
WINDOW_STEPS = 50
"""In a window at least."""
NUM_WINDOWS = 3
"""One after the other, that must agree: one step that hung is no drift."""
DRIFT = 1.25
"""A device with steps that take this many times as long as they should, or as short, is another one
to the planner."""


class Drift:
    """Compares the steps of one stage with a profile."""

    def __init__(
        self,
        profile: DeviceProfile,
        model: ModelCosts,
        layers: range,
        *,
        window_s: float = WINDOW_S,
        streams: bool = False,
    ) -> None:
        """`streams`: some layers are streamed."""
        self.profile = profile
        self.model = model
        self.ratio = 1.0
        """Of the last window: seconds taken over those predicted."""
        self._kinds = Counter(model.layers[number].name for number in layers)
        self._is_tail = layers.stop == len(model.layers)
        self._window_s = window_s
        self._streams = streams
        self._lock = threading.Lock()
        """For the ratios: none that was taken comes back. The engine takes it once in a window."""
        self._ratios: list[float] = []
        self._begin_window()

    def add(self, plan: StepPlan, taken_s: float) -> None:
        """The engine's thread: a step has been computed. One that moves KV, or waits for weights,
        tells nothing of what the device computes."""
        if not plan.rows or plan.moves or self._streams:
            return
        self._predicted_s += compute_s(
            self.profile, self._kinds, step_kind(plan), is_tail=self._is_tail
        )
        self._taken_s += taken_s
        self._num_steps += 1
        if (
            self._taken_s >= self._window_s
            and self._num_steps >= WINDOW_STEPS
            and self._predicted_s > 0
        ):
            self.ratio = self._taken_s / self._predicted_s
            with self._lock:
                self._ratios = [*self._ratios, self.ratio][-NUM_WINDOWS:]
            self._begin_window()

    def take(self) -> float | None:
        """Any thread: by which factor the device has drifted. From then on its profile counts as
        drifted by it."""
        with self._lock:
            ratios = self._ratios
            if len(ratios) < NUM_WINDOWS or not (min(ratios) > DRIFT or max(ratios) < 1 / DRIFT):
                return None
            factor = statistics.median(ratios)
            self.profile = self.profile.scaled(factor)
            self._ratios = []
        return factor

    def _begin_window(self) -> None:
        self._predicted_s = 0.0
        self._taken_s = 0.0
        self._num_steps = 0


def step_kind(plan: StepPlan) -> StepKind:
    """What the planner would call this step. Drafts are among the rows that decode, and in their
    length."""
    decodes = [(row.start, row.length) for row in plan.rows if row.decodes]
    chunks = [(row.start, row.length) for row in plan.rows if not row.decodes]
    return StepKind(
        count=1,
        decodes=sum(length for _, length in decodes),
        decode_context=_context(decodes),
        prefill=sum(length for _, length in chunks),
        prefill_context=_context(chunks),
    )


def _context(rows: list[tuple[int, int]]) -> float:
    """Returns the tokens to which that many rows from each start attend, added up."""
    return sum(length * (start + (length + 1) / 2) for start, length in rows)
