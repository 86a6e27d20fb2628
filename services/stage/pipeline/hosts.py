"""What a pipeline asks of its head, and a control link of its stage. Knows no engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from services.stage.hop.wiring import Wiring
from services.stage.pipeline.status import StageProgress, StageStatus
from shardline.contract.wire import StageCard


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineHost:
    """A head. Called in the pipeline's thread; no function may block for long."""

    list_cards: Callable[[], list[StageCard]]
    """Returns the stages of the head's model. Raises Unavailable while the registry cannot be
    read."""
    on_ready: Callable[[Wiring], None]
    """Steps can pass through every stage."""
    on_lost: Callable[[], None]
    """A stage is gone. Called once after each `on_ready`, before the next."""
    use_lanes: Callable[[int], None]
    """Has that number of steps in flight from now on: the links ask for it."""
    progress: Callable[[], StageProgress]
    """Returns what the head's engine has done in its epoch."""
    exit: Callable[[str], None]
    """Ends the process with a non-zero status, for this reason: it cannot work any more."""


class StageHost(Protocol):
    """A follower. Called in the control link's thread; no method may block."""

    def wire(self, wiring: Wiring) -> None:
        """A new epoch."""

    def unwire(self) -> None:
        """The last wiring is void: drop KV and frames, close its ends."""

    def card_changed(self) -> None:
        """The stage was bound or freed."""

    def status(self) -> StageStatus:
        """What the stage's engine has done in its epoch."""

    def exit(self, reason: str) -> None:
        """End the process with a non-zero status: it cannot work any more."""
