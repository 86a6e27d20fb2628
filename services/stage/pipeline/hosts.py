"""What a pipeline asks of its head, and a control link of its stage. Owns the Protocols; knows no
engine."""

from __future__ import annotations

from typing import Protocol

from services.stage.hop.wiring import Wiring
from services.stage.pipeline.status import StageProgress, StageStatus
from shardline.contract.wire import StageCard


class PipelineHost(Protocol):
    """A head. Called in the pipeline's thread; no method may block for long."""

    def list_cards(self) -> list[StageCard]:
        """The stages of the head's model. Raises Unavailable while the registry cannot be read."""

    def pipeline_ready(self, wiring: Wiring) -> None:
        """Steps can pass through every stage."""

    def pipeline_lost(self, reason: str) -> None:
        """A stage is gone. Called once after each `pipeline_ready`, before the next."""

    def use_lanes(self, num_lanes: int) -> None:
        """Has `num_lanes` steps in flight from now on: the links ask for it."""

    def progress(self) -> StageProgress:
        """What the head's engine has done in its epoch."""

    def exit(self, reason: str) -> None:
        """End the process with a non-zero status: it cannot work any more."""


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
