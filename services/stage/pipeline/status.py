"""What a stage's threads report to one another. Knows neither sockets nor the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from shardline.contract.wire import Count
from shardline_scheduler.step_times import bubble_share

Text: TypeAlias = Annotated[str, Meta(max_length=2048)]


class StageStatus(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a stage's engine has done in one epoch. A head gets it in each PONG, never of another
    epoch than the link's."""

    epoch: int
    num_steps: Count = 0
    """Finished."""
    num_sequences: Count = 0
    num_blocks_used: Count = 0
    compute_us: Count = 0
    hop_us: Count = 0
    """Time that frames took to be read and sent on."""
    wait_us: Count = 0
    """Time without work while the pipeline had a step in flight."""
    power_mw: Count = 0
    """Milliwatts that its device draws while it computes; 0: not known."""
    error: Text | None = None
    """Set: the epoch is over for this stage, for example because its hop was lost."""

    @property
    def bubble_share(self) -> float:
        """Returns the share of the epoch's time in which the stage did not compute."""
        return bubble_share(self.compute_us, self.hop_us, self.wait_us)


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
