"""How a stage answers heads: what each message does and what is answered. Knows no socket of the
control link.

It hands a Wiring over and asks for a status; the engine behind both is unknown here.
"""

from __future__ import annotations

import structlog

from services.stage.hop import Channel, Hop, Kind, Receiver
from services.stage.hop.wiring import Wiring
from services.stage.pipeline import messages
from services.stage.pipeline.binding import Binding, BoundPipeline
from services.stage.pipeline.hosts import StageHost
from services.stage.pipeline.status import StageStatus
from shardline.base.config import Times
from shardline.base.errors import LinkLost, Unavailable
from shardline.contract.wire import StageCard
from shardline_server.failpoints import Point, failpoint

log = structlog.get_logger(__name__)


class ControlHandler:
    """Runs in the control link's thread."""

    def __init__(self, *, card: StageCard, hop: Hop, host: StageHost, times: Times) -> None:
        self._card = card
        self._hop = hop
        self._host = host
        self._connect_s = times.link_dead_s / 2
        self._times = times
        self._binding = Binding(card, times.unbind_s)
        self._receiver: Receiver | None = None
        """Bound for this epoch, not yet the engine's."""

    @property
    def bound(self) -> BoundPipeline | None:
        """Returns who holds the stage. Any thread."""
        return self._binding.bound

    def answer(self, message: messages.ToStage, now_s: float) -> messages.ToHead | None:
        """Does what the message asks, if its sender is to be obeyed."""
        if isinstance(message, messages.Hello):
            return self._hello(message, now_s)
        bound = self._binding.bound
        if bound is None or not self._binding.obeys(message, now_s):
            return self._disown(message)
        match message:
            case messages.Start():
                return self._start(message, bound)
            case messages.Ping():
                return self.pong(message.seq)
            case messages.Exit():
                log.error("told to exit", reason=message.reason)
                self._host.exit(message.reason)
            case messages.Bye():
                self._unbind("its head released it")
        return None

    def pong(self, seq: int) -> messages.Pong | None:
        """What the engine has done for the pipeline that holds the stage."""
        bound = self._binding.bound
        if bound is None:
            return None
        status = self._host.status()
        if status.epoch != bound.epoch:
            status = StageStatus(epoch=bound.epoch)
        return messages.Pong(pipeline=bound.pipeline, epoch=bound.epoch, seq=seq, status=status)

    def check_silence(self, now_s: float) -> None:
        """Frees the stage from a head that has been silent for too long: for `unbind_s`, or for one
        heartbeat once its epoch is lost here, since a head that lives hears of that at once, and
        then sends HELLO or BYE."""
        is_silent = self._binding.is_silent
        times = self._times
        if is_silent(now_s, times.heartbeat_s) and (
            is_silent(now_s, times.unbind_s) or self._has_lost_epoch()
        ):
            self._unbind("its head is silent")

    def close(self) -> None:
        """Closes what the engine has not received."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def _has_lost_epoch(self) -> bool:
        bound = self._binding.bound
        status = self._host.status()
        return bound is not None and status.epoch == bound.epoch and status.error is not None

    def _hello(self, hello: messages.Hello, now_s: float) -> messages.Welcome | messages.Refuse:
        was_bound = self._binding.bound is not None
        refusal = self._binding.hello(hello, now_s)
        if refusal is not None:
            return refusal
        if was_bound:
            self._void_wiring()
        channel = Channel(
            pipeline=hello.pipeline, epoch=hello.epoch, kind=Kind.PLAN, num_lanes=hello.max_lanes
        )
        try:
            self._receiver = self._hop.open_receiver(channel)
        except Unavailable as error:
            return self._fail(hello, str(error))
        log.info("bound", pipeline=str(hello.pipeline), epoch=hello.epoch, head=hello.head)
        self._host.card_changed()
        failpoint(Point.HELLO_TAKEN)
        return messages.Welcome(
            pipeline=hello.pipeline,
            epoch=hello.epoch,
            address=self._receiver.address,
            card=self._card,
        )

    def _start(
        self, start: messages.Start, bound: BoundPipeline
    ) -> messages.Ready | messages.Refuse | None:
        if self._receiver is None:
            return None  # A repeated START: the wiring is the engine's already.
        kind = Kind.RESULT if start.place == start.num_stages - 1 else Kind.PLAN
        channel = Channel(
            pipeline=bound.pipeline, epoch=bound.epoch, kind=kind, num_lanes=start.num_lanes
        )
        try:
            sender = self._hop.open_sender(channel, start.next_address, self._connect_s)
        except LinkLost as error:
            return self._fail(start, str(error))
        wiring = Wiring(
            pipeline=bound.pipeline,
            epoch=bound.epoch,
            stage_index=start.place,
            num_stages=start.num_stages,
            num_lanes=start.num_lanes,
            num_blocks=start.num_blocks,
            receiver=self._receiver,
            sender=sender,
            sends_int8=start.sends_int8,
        )
        self._receiver = None
        self._host.wire(wiring)
        return messages.Ready(pipeline=bound.pipeline, epoch=bound.epoch)

    def _disown(self, message: messages.ToStage) -> messages.Refuse | None:
        """Heads that believe to hold the stage must learn at once that they do not."""
        if not isinstance(message, messages.Ping | messages.Start):
            return None
        return _refuse(
            message, messages.RefusalCode.STALE, "this stage is not bound to you any more"
        )

    def _fail(self, message: messages.ToStage, reason: str) -> messages.Refuse:
        self._unbind(reason)
        return _refuse(message, messages.RefusalCode.FAILED, reason)

    def _unbind(self, reason: str) -> None:
        log.info("unbound", reason=reason)
        self._binding.release()
        self._void_wiring()
        self._host.card_changed()

    def _void_wiring(self) -> None:
        self.close()
        self._host.unwire()


def _refuse(message: messages.ToStage, code: messages.RefusalCode, reason: str) -> messages.Refuse:
    return messages.Refuse(pipeline=message.pipeline, epoch=message.epoch, code=code, reason=reason)
