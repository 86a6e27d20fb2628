"""Whether an assembled pipeline lives, and how fast: pings, silence, errors, hung stages. Owns no
thread and no socket.

`check` is called on every tick and whenever something arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from services.stage.pipeline import messages
from services.stage.pipeline.assembly import AssembledPipeline
from services.stage.pipeline.control_client import ControlClient
from services.stage.pipeline.pace import Pace
from services.stage.pipeline.status import StageProgress, StageStatus
from shardline.base.config import Times
from shardline.base.errors import LinkLost
from shardline.contract.fleet.lanes import lanes_for

log = structlog.get_logger(__name__)


class HeadHangs(Exception):
    """This head's own engine does not come back: nothing but a new process helps."""


@dataclass(slots=True)
class StageHealth:
    """One stage's signs of life."""

    client: ControlClient
    status: StageStatus | None = None
    """Its last answer; None before the first one."""
    round_trip_us: int = 0
    seq: int = 0
    asked_s: float = 0.0
    """When the last PING left."""
    is_waiting: bool = False
    """That PING has no answer yet."""
    pace: Pace = field(default_factory=Pace)


class PipelineMonitor:
    """Watches one assembled pipeline. Times are the caller's monotonic seconds."""

    def __init__(
        self,
        assembled: AssembledPipeline,
        times: Times,
        progress: Callable[[], StageProgress],
        now_s: float,
    ) -> None:
        self._wiring = assembled.wiring
        self._times = times
        self._progress = progress
        self._done: tuple[int, ...] = ()
        """Steps with results that are back, and those of each later stage."""
        self._moved_s = self._looked_s = now_s
        self._own_step_began_s: float | None = None
        self._own_step_s = 0.0
        self._own_pace = Pace()
        self.stages = tuple(StageHealth(client) for client in assembled.clients)

    def check(self, now_s: float) -> None:
        """Raises LinkLost or Refused with the reason when the pipeline is lost, HeadHangs when this
        process is.

        Answers are read before silence is judged: after a pause of this process they all wait in
        the sockets.
        """
        for stage in self.stages:
            self._listen(stage, now_s)
        for stage in self.stages:
            self._ask(stage, now_s)
        self._check_steps(now_s)

    @property
    def num_lanes(self) -> int:
        """Returns how many steps in flight keep the slowest stage busy while frames are on links.
        Those between later stages are not measured; a round that passes the farthest stage is no
        shorter than a ping of it."""
        round_trip_s = max((stage.pace.round_trip_s for stage in self.stages), default=0.0)
        step_s = max([self._own_pace.step_s, *(stage.pace.step_s for stage in self.stages)])
        return lanes_for(len(self.stages) + 1, round_trip_s, step_s)

    def _listen(self, stage: StageHealth, now_s: float) -> None:
        while (message := stage.client.receive()) is not None:
            if not isinstance(message, messages.Pong) or self._is_foreign(message):
                continue
            stage.status = status = message.status
            stage.pace.note_steps(status.num_steps, (status.compute_us + status.hop_us) / 1e6)
            if status.error is not None:
                raise LinkLost(f"{stage.client.card.worker}: {status.error}")
            if stage.is_waiting and message.seq == stage.seq:
                stage.is_waiting = False
                stage.round_trip_us = round((now_s - stage.asked_s) * 1e6)
                stage.pace.note_ping(stage.round_trip_us)

    def _is_foreign(self, message: messages.Pong) -> bool:
        return (message.pipeline, message.epoch) != (self._wiring.pipeline, self._wiring.epoch)

    def _ask(self, stage: StageHealth, now_s: float) -> None:
        waited_s = now_s - stage.asked_s
        if stage.is_waiting:
            if waited_s > self._times.link_dead_s:
                raise LinkLost(f"{stage.client.card.worker}: silent for {waited_s:.1f} s")
        elif waited_s >= self._times.heartbeat_s / 3:
            stage.seq += 1
            stage.asked_s = now_s
            stage.is_waiting = True
            stage.client.send(
                messages.Ping(
                    pipeline=self._wiring.pipeline, epoch=self._wiring.epoch, seq=stage.seq
                )
            )

    def _check_steps(self, now_s: float) -> None:
        """Heartbeats without a finished step of any stage while steps are outstanding: a stage
        hangs."""
        progress = self._progress()
        self._own_pace.note_steps(progress.num_steps + progress.num_outstanding, progress.busy_s)
        if self._waits_for_own_step(progress.step_began_s, now_s):
            self._moved_s = now_s
            return
        is_idle = progress.epoch != self._wiring.epoch or progress.num_outstanding == 0
        later = (stage.status.num_steps if stage.status else 0 for stage in self.stages)
        done = (progress.num_steps, *later)
        if is_idle or done != self._done:
            self._done = done
            self._moved_s = now_s
        elif now_s - self._moved_s > self._times.stall_s:
            self._end_stall(now_s - self._moved_s, progress)

    def _waits_for_own_step(self, began_s: float | None, now_s: float) -> bool:
        """While the head computes, no other stage is to blame. A pause of this process counts as
        one heartbeat."""
        heartbeat_s = self._times.heartbeat_s
        if began_s is None or began_s != self._own_step_began_s:
            self._own_step_began_s = began_s
            self._own_step_s = 0.0
        else:
            self._own_step_s += min(now_s - self._looked_s, heartbeat_s)
        self._looked_s = now_s
        if self._own_step_s > self._times.stall_s:
            raise HeadHangs(
                f"this head hangs: one step has been computing for {self._own_step_s:.1f} s. "
                "If steps may take so long here, "
                "raise SHARDLINE_STALL_S or lower SHARDLINE_TOKEN_BUDGET"
            )
        return self._own_step_s > heartbeat_s

    def _end_stall(self, stalled_s: float, progress: StageProgress) -> None:
        """The first stage that is behind is the one that hangs; if none is, the results are lost on
        their way."""
        num_due = progress.num_steps + progress.num_outstanding
        for stage in self.stages:
            if stage.status is not None and stage.status.num_steps < num_due:
                num_done = stage.status.num_steps
                reason = f"no step finished for {stalled_s:.1f} s, {num_done} of {num_due} done"
                log.error("stage hangs", stage=stage.client.card.worker, reason=reason)
                stage.client.send(
                    messages.Exit(
                        pipeline=self._wiring.pipeline, epoch=self._wiring.epoch, reason=reason
                    )
                )
                stage.client.wait_for_end(self._times.heartbeat_s)
                raise LinkLost(f"{stage.client.card.worker} hangs: {reason}")
        raise LinkLost(f"no result for {stalled_s:.1f} s, though every stage has done its steps")
