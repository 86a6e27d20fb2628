"""Hops: how activations travel from stage to stage. The Protocols; `zeromq` is their first implementation.

A link's two ends live for one epoch: every epoch gets new ones. Each end is used by one thread at a time; only
`Receiver.wake` may be called from any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from services.stage.hop.frame import Frame, Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """What both ends of a link must agree on."""

    pipeline: UUID
    epoch: int
    kind: Kind
    """PLAN down the chain, RESULT from the tail back to the head."""
    num_lanes: int
    """At most num_lanes + 1 steps are in flight: the head is the only source of credit."""


class Sender(Protocol):
    """The sending end."""

    def send(self, frame: Frame) -> None:
        """Never blocks: raises LinkLost when the peer is gone or does not take its credit's worth.

        The tensor's memory must stay as it is until the step's result is back at the head.
        """
        ...

    def close(self) -> None:
        """Drops what is still queued. May be called twice."""
        ...


class Receiver(Protocol):
    """The receiving end."""

    @property
    def address(self) -> str:
        """Where a sender connects."""
        ...

    def receive(self, timeout_s: float) -> Frame | None:
        """The next frame; None after `timeout_s` or `wake`. Checks pipeline, kind, epoch, and that steps are 0, 1, 2 …

        The tensor's memory may start at any address: copy it before kernels that care for alignment.
        Raises LinkLost (skipped, repeated or reordered step; peer gone) or ProtocolError (no valid frame): either way
        this end is of no more use.
        """
        ...

    def wake(self) -> None:
        """From any thread, also after `close`: the present or next `receive` returns at once."""
        ...

    def close(self) -> None:
        """Drops what is still queued. May be called twice."""
        ...


class Hop(Protocol):
    """Opens both ends."""

    def open_receiver(self, channel: Channel) -> Receiver:
        """Bound, with an address to give away."""
        ...

    def open_sender(self, channel: Channel, address: str, timeout_s: float) -> Sender:
        """Connected: the receiver at `address` has answered. Raises LinkLost after `timeout_s`."""
        ...


__all__ = ["Channel", "Frame", "Hop", "Kind", "Receiver", "Sender"]
