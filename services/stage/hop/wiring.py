"""The wiring: all that an engine needs to be one stage of a pipeline for one epoch. Knows no
control link."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from uuid import UUID

import msgspec

from services.stage.hop import Receiver, Sender
from shardline.contract.wire import StageCard

UNKNOWN = "unknown"
"""How results name the source of a power that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One stage of a formed pipeline."""

    card: StageCard
    """As the stage describes itself."""
    sends_int8: bool = False
    """Its activations leave as int8."""

    def describe(self) -> dict[str, Any]:
        """Returns facts for people and tests."""
        facts = msgspec.structs.asdict(self.card)
        capacity = msgspec.structs.asdict(facts.pop("capacity"))
        return {**facts, **capacity, "sends_int8": self.sends_int8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """The links of one stage for one epoch. The engine that gets it uses and closes both ends in
    its own thread."""

    pipeline: UUID
    epoch: int
    stage_index: int
    """The stage's position in the chain; 0 is the head."""
    num_stages: int
    num_lanes: int
    """At most this many steps are in flight, and one more."""
    num_blocks: int
    """The KV blocks that every stage uses: the minimum over the stages."""
    receiver: Receiver | None
    """Receives plans from the stage before; on the head, results from the tail. None in a pipeline
    of one stage."""
    sender: Sender | None
    """Sends plans to the next stage; on the tail, results to the head. None in a pipeline of one
    stage."""
    sends_int8: bool = False
    """Activations leave as int8 with a scale for each row."""
    members: tuple[Member, ...] = ()
    """On the head: all stages in order, the head first."""
    first_lanes: int | None = None
    """On the head: lanes that the epoch begins with, if they follow its links; None: always
    `num_lanes`."""
    num_slots: int = 0
    """On the head: the slots for offloaded KV that every stage has."""
    num_states: int = 0
    """On the head: sequences with recurrent state on every stage that has such layers; 0: no stage
    has."""
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
        """Returns, on the head, whether every stage keeps the exactness rules, and sends its
        activations as they are."""
        return all(member.card.capacity.exact and not member.sends_int8 for member in self.members)

    @property
    def exactness(self) -> str:
        """Returns, on the head, the pipeline's exactness fingerprint, which is the stages' own if
        all of them have the same and no activations are rounded on their way. Else which layers
        have which fingerprint, and where activations are rounded, decides the bits; how many stages
        of one fingerprint stand side by side does not."""
        parts = []
        for name, group in groupby(self.members, key=lambda member: member.card.capacity.exactness):
            alike = list(group)
            first = alike[0].card.first_layer
            last = alike[-1].card.last_layer
            parts.append(f"layers {first} to {last}: {name}")
        rounded = [each.card.last_layer for each in self.members if each.sends_int8]
        parts += [f"int8 before layer {layer}" for layer in rounded]
        if len(parts) == 1:
            return self.members[0].card.capacity.exactness
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def close(self) -> None:
        """Closes both ends."""
        for end in (self.receiver, self.sender):
            if end is not None:
                end.close()
