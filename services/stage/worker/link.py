"""A stage's end of its control link: answers every head that calls, obeys one. Owns the ROUTER socket and its thread.

Knows no engine: it hands a Wiring over and asks for a status.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec
import structlog
import zmq

from services.stage.hop import Channel, Hop, Kind, Receiver
from services.stage.hop.sockets import Sockets
from services.stage.hop.wakeup import Wakeup
from services.stage.hop.wiring import Wiring
from services.stage.worker import control
from services.stage.worker.binding import Binding, Bound
from services.stage.worker.facts import Capacity, StageStatus
from shardline.config import Times
from shardline.errors import LinkLost, ProtocolError, Unavailable
from shardline.wire import StageCard

MAX_BATCH = 100
"""Messages taken before the clock is looked at again."""

log = structlog.get_logger(__name__)


class StageLink:
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
        on_card: Callable[[], None] = lambda: None,
    ) -> None:
        options: dict[int, int] = {zmq.MAXMSGSIZE: control.MAX_CONTROL_BYTES, zmq.ROUTER_MANDATORY: 1}
        self._socket, address = sockets.bind(zmq.ROUTER, options)
        self._card = msgspec.structs.replace(card, control=address)
        self._capacity = capacity
        self._hop = hop
        self._times = times
        self._on_wiring = on_wiring
        self._on_unbind = on_unbind
        self._on_exit = on_exit
        self._on_card = on_card
        self._status = status
        self._binding = Binding(self._card, times.unbind_s)
        self._receiver: Receiver | None = None
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
        self._thread.join()

    def card(self) -> StageCard:
        """From any thread: the card with the control address and the pipeline that holds the stage."""
        bound = self._binding.bound
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
            self._drop_receiver()
            self._socket.close()
            self._wakeup.close()
            if not is_done:
                self._on_exit("the control link's thread failed")  # A deaf stage must not live on.

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakeup.fd, zmq.POLLIN)
        tick_ms = max(1, round(self._times.heartbeat_s * 1000 / 3))
        while not self._stopping:
            poller.poll(tick_ms)
            if self._wakeup.clear() and self._binding.bound is not None:
                self._send(self._head, self._pong(self._binding.bound, 0))
            for _ in range(MAX_BATCH):
                if not self._take():
                    break
            if self._binding.is_silent(time.monotonic()):
                self._unbind("its head is silent")

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
                self._handle(identity, control.decode_to_stage(data))
        except control.OtherVersion as error:
            self._send(identity, control.refusal_of_version(str(error)))
        except ProtocolError as error:
            log.debug("control message dropped", problem=str(error))
        return True

    def _handle(self, identity: bytes, message: control.ToStage) -> None:
        if isinstance(message, control.Hello):
            self._hello(identity, message)
        elif not self._binding.obeys(message, time.monotonic()):
            if isinstance(message, control.Ping | control.Start):
                self._refuse(identity, message, control.RefusalCode.STALE, "this stage is not bound to you any more")
        elif isinstance(message, control.Start):
            self._start_wiring(identity, message)
        elif isinstance(message, control.Ping) and self._binding.bound is not None:
            self._send(identity, self._pong(self._binding.bound, message.seq))
        elif isinstance(message, control.Exit):
            log.error("told to exit", reason=message.reason)
            self._on_exit(message.reason)
        elif isinstance(message, control.Bye):
            self._unbind("its head released it")

    def _hello(self, identity: bytes, hello: control.Hello) -> None:
        was_bound = self._binding.bound is not None
        refusal = self._binding.hello(hello, time.monotonic())
        if refusal is not None:
            self._send(identity, refusal)
            return
        self._head = identity
        if was_bound:
            self._void_wiring()
        channel = Channel(pipeline=hello.pipeline, epoch=hello.epoch, kind=Kind.PLAN, num_lanes=hello.max_lanes)
        try:
            self._receiver = self._hop.open_receiver(channel)
        except Unavailable as error:
            self._unbind(str(error))
            self._refuse(identity, hello, control.RefusalCode.FAILED, str(error))
            return
        log.info("bound", pipeline=str(hello.pipeline), epoch=hello.epoch, head=hello.head)
        self._on_card()
        self._send(
            identity,
            control.Welcome(
                pipeline=hello.pipeline,
                epoch=hello.epoch,
                incarnation=self._card.incarnation,
                address=self._receiver.address,
                num_blocks=self._capacity.num_blocks,
                exactness=self._capacity.exactness,
                exact=self._capacity.exact,
            ),
        )

    def _start_wiring(self, identity: bytes, start: control.Start) -> None:
        bound, receiver = self._binding.bound, self._receiver
        if bound is None or receiver is None:
            return  # A repeated START: the wiring is the engine's already.
        is_tail = start.place == start.num_stages - 1
        channel = Channel(
            pipeline=bound.pipeline,
            epoch=bound.epoch,
            kind=Kind.RESULT if is_tail else Kind.PLAN,
            num_lanes=start.num_lanes,
        )
        try:
            sender = self._hop.open_sender(channel, start.next_address, self._times.link_dead_s / 2)
        except LinkLost as error:
            self._unbind(str(error))
            self._refuse(identity, start, control.RefusalCode.FAILED, str(error))
            return
        self._receiver = None
        self._on_wiring(
            Wiring(
                pipeline=bound.pipeline,
                epoch=bound.epoch,
                place=start.place,
                num_stages=start.num_stages,
                num_lanes=start.num_lanes,
                num_blocks=start.num_blocks,
                receiver=receiver,
                sender=sender,
            )
        )
        self._send(identity, control.Ready(pipeline=bound.pipeline, epoch=bound.epoch))

    def _unbind(self, reason: str) -> None:
        log.info("unbound", reason=reason)
        self._binding.release()
        self._void_wiring()
        self._on_card()

    def _void_wiring(self) -> None:
        self._drop_receiver()
        self._on_unbind()

    def _drop_receiver(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def _pong(self, bound: Bound, seq: int) -> control.Pong:
        status = self._status()
        if status.epoch != bound.epoch:
            status = StageStatus(epoch=bound.epoch)
        return control.Pong(
            pipeline=bound.pipeline,
            epoch=bound.epoch,
            seq=seq,
            num_steps=status.num_steps,
            num_sequences=status.num_sequences,
            num_blocks_used=status.num_blocks_used,
            compute_us=status.compute_us,
            hop_us=status.hop_us,
            error=status.error,
        )

    def _refuse(self, identity: bytes, message: control.ToStage, code: control.RefusalCode, reason: str) -> None:
        refusal = control.Refuse(pipeline=message.pipeline, epoch=message.epoch, code=code, reason=reason)
        self._send(identity, refusal)

    def _send(self, identity: bytes, message: control.ToHead) -> None:
        try:
            self._socket.send_multipart([identity, control.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.debug("answer not taken", problem=str(error))  # A head that is gone, or too slow: it will call again.
