"""The wiring: what an engine needs to take its place in a pipeline for one epoch. Knows no control link."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from uuid import UUID

from services.stage.hop import Receiver, Sender


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One stage of a formed pipeline, as it described itself."""

    incarnation: str
    worker: str
    device: str
    first_layer: int
    last_layer: int
    num_blocks: int
    """KV blocks that its memory holds."""
    exactness: str
    exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """Whoever receives it owns both ends: uses them in one thread, closes them there."""

    pipeline: UUID
    epoch: int
    place: int
    """0 is the head."""
    num_stages: int
    num_lanes: int
    num_blocks: int
    """KV blocks of every stage: the minimum over them."""
    receiver: Receiver | None
    """Plans from the stage before; on the head, results from the tail. None in a pipeline of one stage."""
    sender: Sender | None
    """Plans to the stage behind; on the tail, results to the head. None in a pipeline of one stage."""
    members: tuple[Member, ...] = ()
    """On the head: every stage in order, the head first."""

    @property
    def is_head(self) -> bool:
        """It schedules."""
        return self.place == 0

    @property
    def is_tail(self) -> bool:
        """It samples."""
        return self.place == self.num_stages - 1

    @property
    def exact(self) -> bool:
        """On the head: every stage keeps the exactness rules."""
        return all(member.exact for member in self.members)

    @property
    def exactness(self) -> str:
        """On the head: the pipeline's exactness fingerprint. Equal stages give their own, however many they are."""
        distinct = sorted({member.exactness for member in self.members})
        return distinct[0] if len(distinct) == 1 else hashlib.sha256("\n".join(distinct).encode()).hexdigest()

    def close(self) -> None:
        """Closes both ends."""
        for end in (self.receiver, self.sender):
            if end is not None:
                end.close()
