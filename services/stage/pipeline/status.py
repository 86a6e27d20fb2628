"""What a stage's threads report to one another. Knows neither sockets nor the engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a loaded stage can do."""

    num_blocks: int
    """KV blocks that its memory holds."""
    exactness: str
    exact: bool
    num_slots: int = 0
    """KV blocks that its offload area holds."""
    move_s: float = 0.0
    """Seconds that a block takes there and back."""
    power: str = ""
    """The source of its device's power, such as `rapl`; empty: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStatus:
    """What a stage's engine has done in one epoch. It is not reported for another epoch than the
    link's."""

    epoch: int
    num_steps: int = 0
    """Finished."""
    num_sequences: int = 0
    num_blocks_used: int = 0
    compute_us: int = 0
    hop_us: int = 0
    wait_us: int = 0
    power_mw: int = 0
    """Milliwatts that its device draws while it computes; 0: not known."""
    error: str | None = None
    """Set: the epoch is over for this stage, for example because its hop was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProgress:
    """What a head's engine has done in one epoch."""

    epoch: int
    num_steps: int = 0
    """Steps with results that are back."""
    num_outstanding: int = 0
    """Sent, not yet back."""
    busy_s: float = 0.0
    """With all steps that it has computed."""
    step_began_s: float | None = None
    """Of the step that the head computes now: one that never ends is a hung head."""
