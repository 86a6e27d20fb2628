"""A stage's end of its control links: any head may call. Owns the ROUTER socket and its thread;
decides nothing."""

from __future__ import annotations

import threading

import msgspec
import structlog
import zmq

from services.stage.hop import Hop
from services.stage.hop.sockets import SocketFactory
from services.stage.pipeline import messages
from services.stage.pipeline.control_handler import ControlHandler
from services.stage.pipeline.hosts import StageHost
from shardline.base.clock import monotonic_s
from shardline.base.config import Times
from shardline.base.errors import ProtocolError
from shardline.contract.wire import StageCard

MAX_BATCH = 100
"""Messages taken before the clock is looked at again."""

log = structlog.get_logger(__name__)


class ControlServer:
    """Serves heads in its own thread; the host is called in it."""

    def __init__(
        self,
        *,
        card: StageCard,
        sockets: SocketFactory,
        hop: Hop,
        host: StageHost,
        times: Times,
    ) -> None:
        options: dict[int, int] = {
            zmq.MAXMSGSIZE: messages.MAX_CONTROL_BYTES,
            zmq.ROUTER_MANDATORY: 1,
        }
        self._socket, address = sockets.bind(zmq.ROUTER, options)
        self._card = msgspec.structs.replace(card, control=address)
        self._tick_ms = max(1, round(times.heartbeat_s * 1000 / 3))
        self._host = host
        self._handler = ControlHandler(card=self._card, hop=hop, host=host, times=times)
        self._head = b""
        self._wakeup = sockets.wakeup()
        self._poller = sockets.poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wakeup.fd, zmq.POLLIN)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="control-server", daemon=True)

    def start(self) -> None:
        """Answers from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Closes the link; a bound head sees that at once. The engine's wiring stays the
        engine's."""
        self._stopping = True
        self._wakeup.wake()
        if self._thread.is_alive():
            self._thread.join()

    def card(self) -> StageCard:
        """Returns the card with the control address and the pipeline that holds the stage. Any
        thread."""
        bound = self._handler.bound
        return msgspec.structs.replace(self._card, bound_to=str(bound.pipeline) if bound else None)

    def report(self) -> None:
        """Tells the head the status now; the engine has an error. Any thread."""
        self._wakeup.wake()

    def _run(self) -> None:
        is_done = False
        try:
            self._serve()
            is_done = True
        finally:
            self._handler.close()
            self._socket.close()
            self._wakeup.close()
            if not is_done:
                # A deaf stage must not live on.
                self._host.exit("the control link's thread failed")

    def _serve(self) -> None:
        while not self._stopping:
            self._poller.poll(self._tick_ms)
            if self._wakeup.clear():
                self._send(self._head, self._handler.pong(0))
            for _ in range(MAX_BATCH):
                if not self._take():
                    break
            self._handler.check_silence(monotonic_s())

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
        except Exception:  # whatever a head sends, the stage stays there for others
            log.exception("control message failed")
        return True

    def _handle(self, identity: bytes, message: messages.ToStage) -> None:
        answer = self._handler.answer(message, monotonic_s())
        if isinstance(answer, messages.Welcome):
            self._head = identity
        self._send(identity, answer)

    def _send(self, identity: bytes, message: messages.ToHead | None) -> None:
        if message is None:
            return
        try:
            self._socket.send_multipart([identity, messages.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # A head that is gone, or too slow: it will call again.
            log.debug("answer not taken", problem=str(error))
