"""A stage's end of its control links: any head may call. Owns the ROUTER socket and its thread; decides nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec
import structlog
import zmq

from services.stage.hop import Hop
from services.stage.hop.sockets import Sockets
from services.stage.hop.wakeup import Wakeup
from services.stage.hop.wiring import Wiring
from services.stage.pipeline import messages
from services.stage.pipeline.control_handler import ControlHandler
from services.stage.pipeline.status import Capacity, StageStatus
from shardline.config import Times
from shardline.errors import ProtocolError
from shardline.wire import StageCard

MAX_BATCH = 100
"""Messages taken before the clock is looked at again."""

log = structlog.get_logger(__name__)


def _ignore() -> None:
    """For callers who announce no card."""


class ControlServer:
    """The callbacks run in the link's thread and must not block.

    `on_wiring` hands over a Wiring; `on_unbind` voids the last one: drop KV and frames, close its ends. `on_exit` must
    end the process with a non-zero status. `on_card` says that `card()` has changed.
    """

    def __init__(
        self,
        *,
        card: StageCard,
        capacity: Capacity,
        sockets: Sockets,
        hop: Hop,
        times: Times,
        on_wiring: Callable[[Wiring], None],
        on_unbind: Callable[[], None],
        on_exit: Callable[[str], None],
        status: Callable[[], StageStatus],
        on_card: Callable[[], None] = _ignore,
    ) -> None:
        options: dict[int, int] = {zmq.MAXMSGSIZE: messages.MAX_CONTROL_BYTES, zmq.ROUTER_MANDATORY: 1}
        self._socket, address = sockets.bind(zmq.ROUTER, options)
        self._card = msgspec.structs.replace(card, control=address)
        self._tick_ms = max(1, round(times.heartbeat_s * 1000 / 3))
        self._on_exit = on_exit
        self._reception = ControlHandler(
            card=self._card,
            capacity=capacity,
            hop=hop,
            unbind_s=times.unbind_s,
            connect_s=times.link_dead_s / 2,
            on_wiring=on_wiring,
            on_unbind=on_unbind,
            on_exit=on_exit,
            on_card=on_card,
            status=status,
        )
        self._head = b""
        self._wakeup = Wakeup()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="stage-link", daemon=True)

    def start(self) -> None:
        """Answers from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Closes the link; a bound head sees that at once. The engine's wiring stays the engine's."""
        self._stopping = True
        self._wakeup.wake()
        if self._thread.is_alive():
            self._thread.join()

    def card(self) -> StageCard:
        """From any thread: the card with the control address and the pipeline that holds the stage."""
        bound = self._reception.bound
        return msgspec.structs.replace(self._card, bound_to=str(bound.pipeline) if bound else None)

    def report(self) -> None:
        """From any thread: tell the head the status now; the engine has an error."""
        self._wakeup.wake()

    def _run(self) -> None:
        is_done = False
        try:
            self._serve()
            is_done = True
        finally:
            self._reception.close()
            self._socket.close()
            self._wakeup.close()
            if not is_done:
                self._on_exit("the control link's thread failed")  # A deaf stage must not live on.

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakeup.fd, zmq.POLLIN)
        while not self._stopping:
            poller.poll(self._tick_ms)
            if self._wakeup.clear():
                self._send(self._head, self._reception.pong(0))
            for _ in range(MAX_BATCH):
                if not self._take():
                    break
            self._reception.check_silence(time.monotonic())

    def _take(self) -> bool:
        """Handles one message; False when none waits."""
        try:
            identity = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return False
        data = self._socket.recv() if self._socket.getsockopt(zmq.RCVMORE) else b""
        is_whole = not self._socket.getsockopt(zmq.RCVMORE)
        while self._socket.getsockopt(zmq.RCVMORE):
            self._socket.recv()
        try:
            if is_whole:
                self._handle(identity, messages.decode_to_stage(data))
        except messages.OtherVersion as error:
            self._send(identity, messages.refusal_of_version(str(error)))
        except ProtocolError as error:
            log.debug("control message dropped", problem=str(error))
        return True

    def _handle(self, identity: bytes, message: messages.ToStage) -> None:
        answer = self._reception.answer(message, time.monotonic())
        if isinstance(answer, messages.Welcome):
            self._head = identity
        self._send(identity, answer)

    def _send(self, identity: bytes, message: messages.ToHead | None) -> None:
        if message is None:
            return
        try:
            self._socket.send_multipart([identity, messages.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.debug("answer not taken", problem=str(error))  # A head that is gone, or too slow: it will call again.
