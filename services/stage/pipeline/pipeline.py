"""A head's pipeline: forms it, monitors it, forms it again. Owns the thread and the states; knows
no engine and no SQL.

forming ⇄ ready
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog
import zmq

from services.stage.hop.wiring import Member
from services.stage.pipeline.assembly import AssembledPipeline, PipelineAssembly
from services.stage.pipeline.control_client import StageRefusal
from services.stage.pipeline.hosts import PipelineHost
from services.stage.pipeline.monitor import HeadHangs, PipelineMonitor, StageHealth
from services.stage.pipeline.status import StageStatus
from shardline.base.clock import monotonic_s
from shardline.base.config import Times
from shardline.base.errors import Conflict, LinkLost, Unavailable
from shardline.contract.keys import LOOKS_PER_HEARTBEAT
from shardline.contract.wire import StageCard

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """One stage behind the head, as it last reported."""

    card: StageCard
    status: StageStatus
    round_trip_us: int

    def describe(self) -> dict[str, Any]:
        """Returns facts for people and tests."""
        card = self.card
        return {
            "worker": card.worker,
            "device": card.device,
            "layers": f"{card.first_layer}-{card.last_layer - 1}",
            **msgspec.structs.asdict(self.status),
            "bubble_share": self.status.bubble_share,
            "round_trip_us": self.round_trip_us,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStatus:
    """Serves metrics and inspection."""

    pipeline: str
    is_ready: bool
    epoch: int | None
    """The last one that was ready."""
    reason: str | None
    """While not ready: what is in the way."""
    members: tuple[Member, ...]
    stages: tuple[MemberStatus, ...]

    def describe(self) -> dict[str, Any]:
        """Returns facts for people and tests."""
        return {
            "pipeline": self.pipeline,
            "is_ready": self.is_ready,
            "epoch": self.epoch,
            "reason": self.reason,
            "members": [each.describe() for each in self.members],
            "stages": [each.describe() for each in self.stages],
        }


class Pipeline:
    """Forms the pipeline as often as it is lost, in its own thread."""

    def __init__(self, assembly: PipelineAssembly, times: Times) -> None:
        self._assembly = assembly
        self._times = times
        self._known: list[StageCard] = []
        self._wakeup = assembly.sockets.wakeup()
        self._stopping = False
        self._loss = (-1, "")
        self._assembled: AssembledPipeline | None = None
        self._stages: Sequence[StageHealth] = ()
        self._epoch: int | None = None
        self._reason: str | None = "forming"
        self._thread: threading.Thread | None = None

    def start(self, host: PipelineHost) -> None:
        """Forms the pipeline from now on, for this host."""
        self._host = host
        self._thread = threading.Thread(target=self._run, name="pipeline", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Releases the stages. The engine's wiring stays the engine's; the host is not informed."""
        self._stopping = True
        self._wakeup.wake()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()

    def lost(self, epoch: int, reason: str) -> None:
        """Notes that the engine has lost a hop in this epoch. Any thread. Repeats and older epochs
        do nothing."""
        if epoch > self._loss[0]:
            self._loss = (epoch, reason)
            self._wakeup.wake()

    def status(self) -> PipelineStatus:
        """Returns the pipeline's status. Any thread."""
        assembled = self._assembled
        return PipelineStatus(
            pipeline=str(self._assembly.pipeline),
            is_ready=assembled is not None,
            epoch=self._epoch,
            reason=self._reason,
            members=assembled.wiring.members if assembled else (),
            stages=tuple(
                MemberStatus(
                    card=stage.client.card,
                    status=stage.status or StageStatus(epoch=-1),
                    round_trip_us=stage.round_trip_us,
                )
                for stage in self._stages
            ),
        )

    def _run(self) -> None:
        is_done = False
        try:
            while not self._stopping:
                assembled = self._form()
                if assembled is None:
                    self._pause()
                else:
                    self._keep(assembled)
            is_done = True
        finally:
            self._wakeup.close()
            if not is_done:
                # A head that watches nothing must not live on.
                self._host.exit("the pipeline's thread failed")

    def _form(self) -> AssembledPipeline | None:
        try:
            return self._assembly.form(self._candidates())
        except (Unavailable, Conflict, LinkLost, StageRefusal) as error:
            if str(error) != self._reason:
                log.warning(
                    "pipeline not assembled",
                    pipeline=str(self._assembly.pipeline),
                    reason=str(error),
                )
            self._reason = str(error)
            return None

    def _candidates(self) -> list[StageCard]:
        """The registry's cards; while Redis is unreachable, those seen last."""
        try:
            self._known = self._host.list_cards()
        except Unavailable:
            if not self._known:
                raise
        return self._known

    def _pause(self) -> None:
        """Random, so that heads which raced do not meet again; over at once when a stage has come
        or become free."""
        share = random.uniform(0.25, 1.0)  # noqa: S311 (no secret)
        until_s = monotonic_s() + share * self._times.heartbeat_s
        tried = _offers(self._known)
        while not self._stopping and (rest_s := until_s - monotonic_s()) > 0:
            self._wait(min(rest_s, self._times.heartbeat_s / LOOKS_PER_HEARTBEAT))
            with suppress(Unavailable):
                if _offers(self._candidates()) - tried:
                    return

    def _keep(self, assembled: AssembledPipeline) -> None:
        """Keeps it from ready to lost."""
        monitor = PipelineMonitor(assembled, self._times, self._host.progress, monotonic_s())
        self._epoch = assembled.wiring.epoch
        self._reason = None
        self._stages = monitor.stages
        self._assembled = assembled
        log.info("pipeline ready", pipeline=str(assembled.wiring.pipeline), epoch=self._epoch)
        self._host.on_ready(assembled.wiring)
        reason = self._watch(assembled, monitor)
        self._assembled = None
        self._stages = ()
        self._reason = reason
        assembled.release()
        if not self._stopping:
            log.warning(
                "pipeline lost",
                pipeline=str(assembled.wiring.pipeline),
                epoch=self._epoch,
                reason=reason,
            )
            self._host.on_lost()

    def _watch(self, assembled: AssembledPipeline, monitor: PipelineMonitor) -> str:
        """Why it ended."""
        num_lanes = assembled.wiring.first_lanes
        while not self._stopping:
            lost_epoch, reason = self._loss
            if lost_epoch == assembled.wiring.epoch:
                return reason
            try:
                monitor.check(monotonic_s())
            except (LinkLost, StageRefusal) as error:
                return str(error)
            except HeadHangs as error:
                self._host.exit(str(error))
                return str(error)
            if num_lanes not in (None, monitor.num_lanes):
                num_lanes = monitor.num_lanes
                self._host.use_lanes(num_lanes)
            self._wait(self._times.heartbeat_s / 3, assembled)
        return "stopping"

    def _wait(self, timeout_s: float, assembled: AssembledPipeline | None = None) -> None:
        poller = self._assembly.sockets.poller()
        poller.register(self._wakeup.fd, zmq.POLLIN)
        for client in assembled.clients if assembled else ():
            client.register(poller)
        poller.poll(math.ceil(timeout_s * 1000))
        self._wakeup.clear()


def _offers(cards: Sequence[StageCard]) -> set[tuple[str, str | None]]:
    """Which stages there are, and whom they obey."""
    return {(card.incarnation, card.bound_to) for card in cards}
