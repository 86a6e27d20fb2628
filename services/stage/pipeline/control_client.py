"""A head's end of one control link: one stage, one epoch. Owns the DEALER socket; decides
nothing."""

from __future__ import annotations

import contextlib
import math
from typing import TypeVar

import zmq

from services.stage.hop.sockets import SocketFactory
from services.stage.pipeline import messages
from shardline.base.clock import monotonic_s
from shardline.base.errors import LinkLost, ProtocolError
from shardline.contract.wire import StageCard

LINGER_MS = 500
"""A BYE may still leave after close."""

Answer = TypeVar("Answer", messages.Welcome, messages.Ready)


class StageRefusal(ProtocolError):
    """The stage does not take part, or no longer."""


class ControlClient:
    """Used by one thread. Every method raises LinkLost when the stage is gone and Refused when it
    refuses."""

    def __init__(self, sockets: SocketFactory, card: StageCard, timeout_s: float) -> None:
        self.card = card
        options: dict[int, int] = {
            zmq.LINGER: LINGER_MS,
            zmq.MAXMSGSIZE: messages.MAX_CONTROL_BYTES,
        }
        self.socket, self._watch = sockets.connect(zmq.DEALER, card.control, options, timeout_s)
        self._poller = sockets.poller()
        self.register(self._poller)

    def register(self, poller: zmq.Poller) -> None:
        """Lets `poller` wait for an answer or for the link's end."""
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self._watch.events, zmq.POLLIN)

    def send(self, message: messages.ToStage) -> None:
        """Never blocks."""
        try:
            self.socket.send(messages.encode(message), zmq.NOBLOCK)
        except zmq.Again as error:
            raise LinkLost(
                f"{self.card.worker}: {self._watch.lost() or 'it takes no messages'}"
            ) from error

    def receive(self) -> messages.ToHead | None:
        """The next message that waits."""
        try:
            parts = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            problem = self._watch.lost()
            if problem is not None:
                raise LinkLost(f"{self.card.worker}: {problem}") from None
            return None
        try:
            message = messages.decode_to_head(parts[0])
        except messages.OtherVersion as error:
            raise StageRefusal(
                f"{self.card.worker}: {messages.RefusalCode.PROTOCOL}: {error}"
            ) from error
        except ProtocolError as error:
            raise LinkLost(f"{self.card.worker}: {error}") from error
        if isinstance(message, messages.Refuse):
            raise StageRefusal(f"{self.card.worker}: {message.code}: {message.reason}")
        return message

    def expect(self, kind: type[Answer], timeout_s: float) -> Answer:
        """Waits for an answer of this kind."""
        deadline = monotonic_s() + timeout_s
        while True:
            message = self.receive()
            if isinstance(message, kind):
                return message
            if message is None:
                left_s = deadline - monotonic_s()
                if left_s <= 0:
                    raise LinkLost(
                        f"{self.card.worker}: no {kind.__name__.upper()} in {timeout_s:.1f} s"
                    )
                self._poller.poll(math.ceil(left_s * 1000))

    def wait_for_end(self, timeout_s: float) -> None:
        """Waits until the stage is gone, or `timeout_s` passed. A connection that is closed while
        an answer is on its way is reset, and the other side then never reads the last message."""
        deadline = monotonic_s() + timeout_s
        with contextlib.suppress(LinkLost, StageRefusal):
            while (left_s := deadline - monotonic_s()) > 0:
                if self.receive() is None:
                    self._poller.poll(math.ceil(left_s * 1000))

    def close(self, goodbye: messages.Bye | None = None) -> None:
        """Sends BYE if the stage is to be released."""
        if goodbye is not None:
            with contextlib.suppress(LinkLost):  # Gone already.
                self.send(goodbye)
        self._watch.close()
        self.socket.close()
