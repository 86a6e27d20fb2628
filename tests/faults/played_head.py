"""A head that a test plays itself, towards one real tail: it binds, wires and sends steps. Knows no
scheduler."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Sequence
from uuid import uuid4

import zmq

from services.stage.hop import Channel, Frame, Kind, Receiver
from services.stage.hop import frame as frames
from services.stage.hop.frame import Buffer
from services.stage.hop.sockets import Sockets
from services.stage.hop.zeromq import ZeroMqHop
from services.stage.pipeline import messages
from services.stage.pipeline.control_client import ControlClient
from shardline.base.config import Times
from shardline.contract.wire import StageCard
from shardline_scheduler.step_plan import StepResult, decode_result

PATIENCE_S = 60.0
NUM_LANES = 2


class PlayedHead:
    """Bound to the stage of `card` from the first `wire` on. The test's thread only."""

    def __init__(self, card: StageCard) -> None:
        self.pipeline = uuid4()
        self.epoch = 0
        self.card = card
        self._sockets = Sockets(bind="tcp://127.0.0.1")
        self._hop = ZeroMqHop(self._sockets, Times())
        self._call = ControlClient(self._sockets, card, PATIENCE_S)
        self._results: Receiver | None = None
        self._plans: zmq.Socket[bytes] | None = None
        self.hop_address = ""
        """Where the stage takes plans in this epoch."""

    def wire(self) -> None:
        """The next epoch: HELLO, START, READY."""
        self._unwire()
        self.epoch += 1
        self._call.send(self.hello())
        welcome = self._call.expect(messages.Welcome, PATIENCE_S)
        self.hop_address = welcome.address
        channel = Channel(
            pipeline=self.pipeline, epoch=self.epoch, kind=Kind.RESULT, num_lanes=NUM_LANES
        )
        self._results = self._hop.open_receiver(channel)
        self._call.send(
            messages.Start(
                pipeline=self.pipeline,
                epoch=self.epoch,
                place=1,
                num_stages=2,
                num_lanes=NUM_LANES,
                num_blocks=welcome.card.capacity.num_blocks,
                next_address=self._results.address,
            )
        )
        self._call.expect(messages.Ready, PATIENCE_S)
        self._plans, watch = self._sockets.connect(
            zmq.PUSH, welcome.address, {zmq.SNDHWM: 1000}, PATIENCE_S
        )
        watch.close()

    def hello(self) -> messages.Hello:
        """As the stage of this card wants it."""
        card = self.card
        return messages.Hello(
            pipeline=self.pipeline,
            epoch=self.epoch,
            head="played",
            model=card.model,
            fingerprint=card.fingerprint,
            dtype=card.dtype,
            first_layer=card.first_layer,
            last_layer=card.last_layer,
            max_lanes=NUM_LANES,
        )

    def frame(self, message: bytes, hidden: Sequence[float] = (), *, width: int = 1) -> Frame:
        """Step 0 of this epoch: its plan, with activations if there are any."""
        tensor = array("f", hidden)
        return Frame(
            kind=Kind.PLAN,
            pipeline=self.pipeline,
            epoch=self.epoch,
            step=0,
            message=message,
            tensor=memoryview(tensor) if hidden else None,
            dtype="float32" if hidden else "",
            shape=(len(hidden) // width, width) if hidden else (),
        )

    def send(self, parts: Sequence[Buffer]) -> bool:
        """Whatever it is; False when the stage has dropped the link."""
        assert self._plans is not None
        with contextlib.suppress(zmq.Again):
            self._plans.send_multipart(parts, zmq.NOBLOCK)
            return True
        return False

    def compute(self, frame: Frame) -> StepResult:
        """The tail's answer to a step."""
        self.send(frames.encode(frame))
        assert self._results is not None
        answer = self._results.receive(PATIENCE_S)
        assert answer is not None, "no answer"
        return decode_result(answer.message)

    def beat(self) -> None:
        """Keeps the stage bound."""
        self._call.send(messages.Ping(pipeline=self.pipeline, epoch=self.epoch, seq=1))

    def told(self) -> str:
        """Until the stage says that it has lost this epoch: why."""
        poller = zmq.Poller()
        self._call.register(poller)
        while True:
            message = self._call.receive()
            status = message.status if isinstance(message, messages.Pong) else None
            if status is not None and status.error and status.epoch == self.epoch:
                return status.error
            if message is None:
                assert poller.poll(int(PATIENCE_S * 1000)), (
                    "the stage says nothing of its lost epoch"
                )

    def close(self) -> None:
        """Releases the stage."""
        self._unwire()
        self._call.close(messages.Bye(pipeline=self.pipeline, epoch=self.epoch))
        self._sockets.close()

    def _unwire(self) -> None:
        if self._results is not None:
            self._results.close()
        if self._plans is not None:
            self._plans.close()
