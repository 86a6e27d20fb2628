"""A head's pipeline: forms it, watches it, forms it anew. Owns the thread and the states; knows no engine, no Postgres.

forming ⇄ ready
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from uuid import UUID

import structlog
import zmq

from services.stage.hop import Hop
from services.stage.hop.sockets import Sockets
from services.stage.hop.wakeup import Wakeup
from services.stage.hop.wiring import Member, Wiring
from services.stage.pipeline.assembly import AssembledPipeline, PipelineAssembly
from services.stage.pipeline.control_client import Refused
from services.stage.pipeline.monitor import HeadHangs, PipelineMonitor, StageHealth
from services.stage.pipeline.status import Capacity, StageProgress
from shardline.config import Times
from shardline.errors import Conflict, LinkLost, Unavailable
from shardline.wire import StageCard

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """One stage behind the head, as it last said."""

    worker: str
    device: str
    layers: str
    num_steps: int
    num_sequences: int
    num_blocks_used: int
    compute_us: int
    hop_us: int
    round_trip_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStatus:
    """For metrics and inspection."""

    pipeline: str
    is_ready: bool
    epoch: int | None
    """The last one that was ready."""
    reason: str | None
    """While not ready: what is in the way."""
    members: tuple[Member, ...]
    stages: tuple[MemberStatus, ...]


class Pipeline:
    """The callbacks run in the pipeline's thread and must not block for long.

    `cards` lists the registry and `next_epoch` takes a new epoch from Postgres; both raise Unavailable when their
    server is away, and `next_epoch` Conflict while the pipeline is another head's. Every `on_ready` is followed by one
    `on_lost` before the next. `on_exit` must end the process.
    """

    def __init__(
        self,
        *,
        pipeline: UUID,
        card: StageCard,
        capacity: Capacity,
        sockets: Sockets,
        hop: Hop,
        times: Times,
        cards: Callable[[], list[StageCard]],
        next_epoch: Callable[[], int],
        on_ready: Callable[[Wiring], None],
        on_lost: Callable[[str], None],
        on_exit: Callable[[str], None],
        progress: Callable[[], StageProgress],
        num_lanes: int | None = None,
    ) -> None:
        self._forming = PipelineAssembly(
            pipeline=pipeline,
            card=card,
            capacity=capacity,
            sockets=sockets,
            hop=hop,
            timeout_s=times.link_dead_s,
            num_lanes=num_lanes,
            next_epoch=next_epoch,
        )
        self._times = times
        self._cards = cards
        self._known: list[StageCard] = []
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._on_exit = on_exit
        self._progress = progress
        self._wakeup = Wakeup()
        self._stopping = False
        self._loss = (-1, "")
        self._formed: AssembledPipeline | None = None
        self._pulses: Sequence[StageHealth] = ()
        self._epoch: int | None = None
        self._reason: str | None = "forming"
        self._thread = threading.Thread(target=self._run, name="pipeline", daemon=True)

    def start(self) -> None:
        """Forms the pipeline from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Releases the stages. The engine's wiring stays the engine's; `on_lost` is not called."""
        self._stopping = True
        self._wakeup.wake()
        if self._thread.is_alive():
            self._thread.join()

    def lost(self, epoch: int, reason: str) -> None:
        """From any thread: the engine has lost a hop in this epoch. Repeats and older epochs do nothing."""
        if epoch > self._loss[0]:
            self._loss = (epoch, reason)
            self._wakeup.wake()

    def status(self) -> PipelineStatus:
        """From any thread."""
        formed = self._formed
        return PipelineStatus(
            pipeline=str(self._forming.pipeline),
            is_ready=formed is not None,
            epoch=self._epoch,
            reason=self._reason,
            members=formed.wiring.members if formed else (),
            stages=tuple(_status(pulse) for pulse in self._pulses),
        )

    def _run(self) -> None:
        is_done = False
        try:
            while not self._stopping:
                formed = self._form()
                if formed is None:
                    self._pause()
                else:
                    self._keep(formed)
            is_done = True
        finally:
            self._wakeup.close()
            if not is_done:
                self._on_exit("the pipeline's thread failed")  # A head that watches nothing must not live on.

    def _form(self) -> AssembledPipeline | None:
        try:
            return self._forming.form(self._candidates())
        except (Unavailable, Conflict, LinkLost, Refused) as error:
            if str(error) != self._reason:
                log.warning("pipeline not formed", pipeline=str(self._forming.pipeline), reason=str(error))
            self._reason = str(error)
            return None

    def _candidates(self) -> list[StageCard]:
        """The registry's cards; while Redis is away, those seen last."""
        try:
            self._known = self._cards()
        except Unavailable:
            if not self._known:
                raise
        return self._known

    def _pause(self) -> None:
        """Random, so that heads which raced do not meet again."""
        self._wait(random.uniform(0.25, 1.0) * self._times.heartbeat_s)  # noqa: S311 (no secret)

    def _keep(self, formed: AssembledPipeline) -> None:
        """From ready to lost."""
        vigil = PipelineMonitor(formed, self._times, self._progress, time.monotonic())
        self._epoch, self._reason, self._pulses, self._formed = formed.wiring.epoch, None, vigil.pulses, formed
        log.info("pipeline ready", pipeline=str(formed.wiring.pipeline), epoch=self._epoch)
        self._on_ready(formed.wiring)
        reason = self._watch(formed, vigil)
        self._formed, self._pulses, self._reason = None, (), reason
        formed.release()
        if not self._stopping:
            log.warning("pipeline lost", pipeline=str(formed.wiring.pipeline), epoch=self._epoch, reason=reason)
            self._on_lost(reason)

    def _watch(self, formed: AssembledPipeline, vigil: PipelineMonitor) -> str:
        """Why it ended."""
        while not self._stopping:
            lost_epoch, reason = self._loss
            if lost_epoch == formed.wiring.epoch:
                return reason
            try:
                vigil.look(time.monotonic())
            except (LinkLost, Refused) as error:
                return str(error)
            except HeadHangs as error:
                self._on_exit(str(error))
                return str(error)
            self._wait(self._times.heartbeat_s / 3, formed)
        return "stopping"

    def _wait(self, timeout_s: float, formed: AssembledPipeline | None = None) -> None:
        poller = zmq.Poller()
        poller.register(self._wakeup.fd, zmq.POLLIN)
        for call in formed.calls if formed else ():
            call.register(poller)
        poller.poll(math.ceil(timeout_s * 1000))
        self._wakeup.clear()


def _status(pulse: StageHealth) -> MemberStatus:
    card, pong = pulse.call.card, pulse.pong
    return MemberStatus(
        worker=card.worker,
        device=card.device,
        layers=f"{card.first_layer}-{card.last_layer - 1}",
        num_steps=pong.num_steps if pong else 0,
        num_sequences=pong.num_sequences if pong else 0,
        num_blocks_used=pong.num_blocks_used if pong else 0,
        compute_us=pong.compute_us if pong else 0,
        hop_us=pong.hop_us if pong else 0,
        round_trip_us=pulse.round_trip_us,
    )
