"""Hops: how activations travel from stage to stage. Owns the Protocols, which `zeromq` implements;
knows no engine.

A link's two ends live for one epoch: every epoch gets new ones. Each end is used by one thread at a
time; only `Receiver.wake` may be called from any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from services.stage.hop.frame import Frame, Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """The properties of a link on which both ends must agree."""

    pipeline: UUID
    epoch: int
    kind: Kind
    """PLAN for links down the chain, RESULT for the link from the tail back to the head."""
    num_lanes: int
    """At most num_lanes + 1 steps are in flight: the head is the only source of credit."""


class Sender(Protocol):
    """The sending end of a link."""

    def send(self, frame: Frame) -> None:
        """Sends a frame without blocking.

        Raises LinkLost if the peer is gone, or takes fewer frames than the credit allows. The
        tensor's memory must not change until the step's result is back at the head.
        """
        ...

    def close(self) -> None:
        """Closes the end and drops what is still queued. May be called twice."""
        ...


class Receiver(Protocol):
    """The receiving end of a link."""

    @property
    def address(self) -> str:
        """The address to which a sender connects."""
        ...

    def receive(self, timeout_s: float) -> Frame | None:
        """Returns the next frame; None after `timeout_s` or `wake`.

        It checks pipeline, kind and epoch, and that steps are numbered 0, 1, 2 and so on. The
        tensor's memory may start at any address: copy it before kernels that need alignment. Raises
        LinkLost for a skipped, repeated or reordered step or a lost peer, ProtocolError for an
        invalid frame; close this end then.
        """
        ...

    def wake(self) -> None:
        """Makes the present or next `receive` return at once. May be called from any thread, also
        after `close`."""
        ...

    def close(self) -> None:
        """Closes the end and drops what is still queued. May be called twice."""
        ...


class Hop(Protocol):
    """Opens the ends of links."""

    def open_receiver(self, channel: Channel) -> Receiver:
        """Opens the receiving end, bound to an address that a sender can use."""
        ...

    def open_sender(self, channel: Channel, address: str, timeout_s: float) -> Sender:
        """Opens the sending end, connected to the receiver at `address`. Raises LinkLost after
        `timeout_s`."""
        ...


__all__ = ["Channel", "Frame", "Hop", "Kind", "Receiver", "Sender"]
