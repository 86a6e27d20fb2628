"""How long a stage is busy with a step, and how far away it is, by its answers to pings. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

NUM_STEPS = 16
"""A stage's time for a step is averaged over this many, at least."""
NUM_PINGS = 8
"""The fastest of this many counts: whatever else a host does only adds."""


@dataclass(slots=True)
class Pace:
    """One stage's in one epoch."""

    step_s: float = 0.0
    """0 until enough steps were seen."""
    _num_steps: int = 0
    _busy_s: float = 0.0
    """Up to the end of the last average."""
    _round_trips_us: deque[int] = field(default_factory=lambda: deque(maxlen=NUM_PINGS))

    @property
    def round_trip_s(self) -> float:
        """Returns the time to the stage and back; 0 before its first answer."""
        return min(self._round_trips_us, default=0) / 1e6

    def note_ping(self, round_trip_us: int) -> None:
        """One was answered."""
        self._round_trips_us.append(round_trip_us)

    def note_steps(self, num_steps: int, busy_s: float) -> None:
        """What the stage has done since the epoch began: computing and handling frames took
        `busy_s`."""
        num_new = num_steps - self._num_steps
        if num_new >= NUM_STEPS:
            self.step_s = (busy_s - self._busy_s) / num_new
            self._num_steps = num_steps
            self._busy_s = busy_s
