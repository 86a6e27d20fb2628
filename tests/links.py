"""Stages and heads of pipelines as threads of one process: real sockets, no engine. For tests of
binding."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID, uuid4

import msgspec
import structlog

from services.stage.hop import Frame, Kind
from services.stage.hop.sockets import Sockets
from services.stage.hop.wiring import Wiring
from services.stage.hop.zeromq import ZeroMqHop
from services.stage.pipeline.assembly import PipelineAssembly
from services.stage.pipeline.control_client import ControlClient
from services.stage.pipeline.control_server import ControlServer
from services.stage.pipeline.hosts import PipelineHost
from services.stage.pipeline.pipeline import Pipeline
from services.stage.pipeline.status import StageProgress, StageStatus
from shardline.base.config import Times
from shardline.contract.wire import Capacity, StageCard

TIMES = Times(heartbeat_s=0.15, link_dead_s=4.0, unbind_s=2.0, stall_s=60.0)
PATIENCE_S = 60.0
NUM_LAYERS = 12


CAPACITY_FIELDS = Capacity.__struct_fields__
ROOMY = Capacity(num_blocks=100, exactness="e", exact=True, move_us=1000)


def make_card(first_layer: int, last_layer: int, **changes: Any) -> StageCard:
    """Returns a stage's card; all made here fit each other, but for `changes` of it and of its
    capacity."""
    of_capacity = _of_capacity(changes)
    card = StageCard(
        incarnation=uuid4().hex,
        worker=f"stage-{first_layer}@{uuid4().hex[:4]}",
        model="tiny",
        fingerprint="f" * 64,
        dtype="float32",
        first_layer=first_layer,
        last_layer=last_layer,
        num_layers=NUM_LAYERS,
        control="",
        device="cpu:0",
        weights_dtype="float32",
        machine="m",
        capacity=msgspec.structs.replace(ROOMY, **of_capacity),
    )
    return msgspec.structs.replace(card, **changes)


def _of_capacity(options: dict[str, Any]) -> dict[str, Any]:
    """Takes those of a capacity out of `options`."""
    return {name: options.pop(name) for name in CAPACITY_FIELDS if name in options}


class Stage:
    """A stage without an engine: what its link tells it queues in `wirings`, `unbinds` and
    `exits`."""

    def __init__(self, sockets: Sockets, card: StageCard, times: Times) -> None:
        self.wirings: queue.Queue[Wiring] = queue.Queue()
        self.unbinds: queue.Queue[None] = queue.Queue()
        self.exits: queue.Queue[str] = queue.Queue()
        self.last_status = StageStatus(epoch=-1)
        self.asked: queue.Queue[None] = queue.Queue()
        self.may_answer = threading.Event()
        self.may_answer.set()
        self._wired: Wiring | None = None
        hop = ZeroMqHop(sockets, times)
        self.link = ControlServer(card=card, sockets=sockets, hop=hop, host=self, times=times)
        self.link.start()

    def has_told(self, status: StageStatus) -> None:
        """Until the head has it: a head asks again only when the answer before has arrived."""
        self.last_status = status
        while not self.asked.empty():
            self.asked.get()
        for _ in range(3):
            self.asked.get(timeout=PATIENCE_S)

    def fail(self, error: str) -> None:
        """As an engine does that lost its hop."""
        assert self._wired is not None
        self.last_status = StageStatus(epoch=self._wired.epoch, error=error)
        self.link.report()

    def close(self) -> None:
        """Gone, as a killed process: its connections break."""
        self.may_answer.set()
        self.link.stop()
        self._close_wiring()

    def wire(self, wiring: Wiring) -> None:
        """A head has bound this stage."""
        self._wired = wiring
        self.wirings.put(wiring)

    def unwire(self) -> None:
        """It is free again."""
        self._close_wiring()
        self.unbinds.put(None)

    def card_changed(self) -> None:
        """The registry of these tests reads the card itself."""

    def status(self) -> StageStatus:
        """The last one told, once a test lets it answer."""
        self.may_answer.wait()
        self.asked.put(None)
        return self.last_status

    def exit(self, reason: str) -> None:
        """Noted."""
        self.exits.put(reason)

    def _close_wiring(self) -> None:
        if self._wired is not None:
            self._wired.close()
            self._wired = None


class Head:
    """A head without an engine. `readies`, `lanes` and `losses` queue what its pipeline tells
    it."""

    def __init__(
        self,
        sockets: Sockets,
        card: StageCard,
        times: Times,
        cards: Callable[[], list[StageCard]],
        *,
        next_epoch: Callable[[], int] | None = None,
        readies: queue.Queue[Wiring] | None = None,
        far_int8: bool = False,
    ) -> None:
        self.readies: queue.Queue[Wiring] = readies or queue.Queue()
        self.losses: queue.Queue[str] = queue.Queue()
        self.lanes: queue.Queue[int] = queue.Queue()
        self.last_progress = StageProgress(epoch=-1)
        self._wired: Wiring | None = None
        assembly = PipelineAssembly(
            pipeline=uuid4(),
            card=card,
            sockets=sockets,
            hop=ZeroMqHop(sockets, times),
            timeout_s=times.link_dead_s,
            num_lanes=None,
            next_epoch=next_epoch or itertools.count(1).__next__,
            far_int8=far_int8,
        )
        host = PipelineHost(
            list_cards=cards,
            on_ready=self._on_ready,
            on_lost=self._on_lost,
            use_lanes=self.lanes.put,
            progress=lambda: self.last_progress,
            exit=self.losses.put,
        )
        self.pipeline = Pipeline(assembly, times)
        self.pipeline.start(host)

    def ready(self) -> Wiring:
        """The next wiring."""
        return self.readies.get(timeout=PATIENCE_S)

    def close(self) -> None:
        """An orderly end."""
        self.pipeline.stop()
        self._close_wiring()

    def _on_ready(self, wiring: Wiring) -> None:
        self._wired = wiring
        self.readies.put(wiring)

    def _on_lost(self) -> None:
        reason = self.pipeline.status().reason
        assert reason is not None
        self._close_wiring()
        self.losses.put(reason)

    def _close_wiring(self) -> None:
        if self._wired is not None:
            self._wired.close()
            self._wired = None


class Pipes:
    """All stages and heads of one test. The registry is the list of its live stages."""

    def __init__(
        self, sockets: Sockets, log_lines: queue.Queue[structlog.typing.EventDict]
    ) -> None:
        self.sockets = sockets
        self._log_lines = log_lines
        self.stages: list[Stage] = []
        self.heads: list[Head] = []

    def cards(self) -> list[StageCard]:
        """As the registry would list them."""
        return [stage.link.card() for stage in self.stages]

    def stage(
        self, first_layer: int, last_layer: int, times: Times = TIMES, **options: Any
    ) -> Stage:
        """One more stage; options change its card."""
        stage = Stage(self.sockets, make_card(first_layer, last_layer, **options), times)
        self.stages.append(stage)
        return stage

    def head(self, last_layer: int, times: Times = TIMES, **options: Any) -> Head:
        """One more head, forming at once. Options of its capacity change its card."""
        card = make_card(0, last_layer, **_of_capacity(options))
        head = Head(self.sockets, card, times, options.pop("cards", self.cards), **options)
        self.heads.append(head)
        return head

    def call(self, stage: Stage) -> ControlClient:
        """A control link of a head that the test plays itself."""
        return ControlClient(self.sockets, stage.link.card(), PATIENCE_S)

    def reason(self, head: Head, text: str) -> str:
        """Until the head's log says this of why it is not ready."""
        while True:
            line = self._log_lines.get(timeout=PATIENCE_S)
            if line.get("pipeline") == head.pipeline.status().pipeline and text in line.get(
                "reason", ""
            ):
                return str(line["reason"])

    def lose(self, stage: Stage) -> None:
        """The stage dies and its card goes."""
        self.stages.remove(stage)
        stage.close()


@contextmanager
def open_pipes(sockets: Sockets) -> Iterator[Pipes]:
    """Closes everything at the end, heads first."""
    log_lines: queue.Queue[structlog.typing.EventDict] = queue.Queue()

    def keep(_logger: object, _method: str, line: structlog.typing.EventDict) -> str:
        log_lines.put(line)
        raise structlog.DropEvent

    structlog.configure(processors=[keep])
    pipes = Pipes(sockets, log_lines)
    try:
        yield pipes
    finally:
        for head in pipes.heads:
            head.close()
        for stage in pipes.stages:
            stage.close()
        sockets.close()
        structlog.reset_defaults()


def pass_a_step(pipeline: UUID, wirings: list[Wiring], step: int) -> None:
    """Sends a plan through every stage and its result back to the head: the wiring is right."""
    for stage_index, wiring in enumerate(wirings):
        is_tail = stage_index == len(wirings) - 1
        assert wiring.sender is not None
        wiring.sender.send(
            Frame(
                kind=Kind.RESULT if is_tail else Kind.PLAN,
                pipeline=pipeline,
                epoch=wiring.epoch,
                step=step,
                message=b"step",
            )
        )
        receiver = wirings[(stage_index + 1) % len(wirings)].receiver
        assert receiver is not None
        frame = receiver.receive(PATIENCE_S)
        assert frame is not None
        assert frame.step == step
