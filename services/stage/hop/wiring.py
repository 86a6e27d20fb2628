"""The wiring: all that an engine needs to be one stage of a pipeline for one epoch. Knows no control link."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from uuid import UUID

from services.stage.hop import Receiver, Sender


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One stage of a formed pipeline, as it describes itself."""

    incarnation: str
    worker: str
    device: str
    weights_dtype: str | None
    """`int8`, or the dtype of activations; None: a stage of the last release does not say."""
    first_layer: int
    last_layer: int
    num_blocks: int
    """The number of KV blocks that its memory holds."""
    exactness: str
    exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """The links of one stage for one epoch. The engine that gets it uses and closes both ends in its own thread."""

    pipeline: UUID
    epoch: int
    stage_index: int
    """The stage's position in the chain; 0 is the head."""
    num_stages: int
    num_lanes: int
    num_blocks: int
    """The KV blocks that every stage uses: the minimum over the stages."""
    receiver: Receiver | None
    """Receives plans from the stage before; on the head, results from the tail. None in a pipeline of one stage."""
    sender: Sender | None
    """Sends plans to the next stage; on the tail, results to the head. None in a pipeline of one stage."""
    members: tuple[Member, ...] = ()
    """On the head: all stages in order, the head first."""
    num_slots: int = 0
    """On the head: the slots for offloaded KV that every stage has."""
    move_s: float = 0.0
    """On the head: seconds in which the slowest stage copies a KV block to a slot and back."""

    @property
    def is_head(self) -> bool:
        """Whether this stage schedules."""
        return self.stage_index == 0

    @property
    def is_tail(self) -> bool:
        """Whether this stage samples."""
        return self.stage_index == self.num_stages - 1

    @property
    def exact(self) -> bool:
        """On the head: whether every stage keeps the exactness rules."""
        return all(member.exact for member in self.members)

    @property
    def exactness(self) -> str:
        """On the head: the pipeline's exactness fingerprint, which is the stages' own if all of them have the same."""
        distinct = sorted({member.exactness for member in self.members})
        return distinct[0] if len(distinct) == 1 else hashlib.sha256("\n".join(distinct).encode()).hexdigest()

    def close(self) -> None:
        """Closes both ends."""
        for end in (self.receiver, self.sender):
            if end is not None:
                end.close()
