"""When a head takes a stage, or itself, for hung: judged by what stages say and by a clock that the
test moves."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest

from services.stage.pipeline import messages
from services.stage.pipeline.monitor import HeadHangs, PipelineMonitor
from services.stage.pipeline.status import StageProgress, StageStatus
from services.stage.settings import StageSettings
from shardline.base.config import Times
from shardline.base.errors import LinkLost

EPOCH = 3
PIPELINE = UUID(int=1)
TIMES = Times(heartbeat_s=1.0, link_dead_s=3.0, stall_s=30.0)


class Stage:
    """The head's end of a control link: a stage that answers every PING with the steps that it has
    done."""

    def __init__(self, name: str) -> None:
        self.card = SimpleNamespace(worker=name)
        self.num_steps = 0
        self.told: list[messages.ToStage] = []
        self._answers: deque[messages.Pong] = deque()

    def send(self, message: messages.ToStage) -> None:
        if isinstance(message, messages.Ping):
            status = StageStatus(epoch=EPOCH, num_steps=self.num_steps)
            seq = message.seq
            pong = messages.Pong(pipeline=PIPELINE, epoch=EPOCH, seq=seq, status=status)
            self._answers.append(pong)
        else:
            self.told.append(message)

    def receive(self) -> messages.ToHead | None:
        return self._answers.popleft() if self._answers else None

    def wait_for_end(self, timeout_s: float) -> None:
        """It is gone as soon as it is told."""


class Watch:
    """A monitor of a head and its stages, one check a second."""

    def __init__(self, *stages: Stage, times: Times = TIMES) -> None:
        self.progress = StageProgress(epoch=EPOCH, num_outstanding=1)
        self.now_s = 0.0
        wiring = SimpleNamespace(pipeline=PIPELINE, epoch=EPOCH)
        assembled = cast(Any, SimpleNamespace(clients=stages, wiring=wiring))
        self._monitor = PipelineMonitor(assembled, times, lambda: self.progress, self.now_s)

    def wait(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 1.0
            self._monitor.check(self.now_s)


def test_stages_that_each_take_long_in_turn_are_not_hung() -> None:
    stages = [Stage("second"), Stage("third"), Stage("tail")]
    watch = Watch(*stages)
    for stage in stages:
        watch.wait(25)
        stage.num_steps = 1
    watch.progress = StageProgress(epoch=EPOCH, num_steps=1, num_outstanding=1)
    watch.wait(25)
    assert [stage.told for stage in stages] == [[], [], []]


def test_only_the_stage_that_hangs_is_told_to_exit() -> None:
    second = Stage("second")
    tail = Stage("tail")
    watch = Watch(second, tail)
    watch.wait(25)
    second.num_steps = 1
    with pytest.raises(LinkLost, match="tail hangs"):
        watch.wait(40)
    assert second.told == []
    assert [type(message) for message in tail.told] == [messages.Exit]


@pytest.mark.parametrize(("stall_s", "hangs"), [(30.0, True), (120.0, False)])
def test_the_setting_decides_over_a_step_that_takes_a_minute(stall_s: float, hangs: bool) -> None:
    settings = StageSettings(model="m", stall_s=stall_s)
    watch = Watch(times=settings.times)
    watch.progress = StageProgress(epoch=EPOCH, num_outstanding=1, step_began_s=1.0)
    if not hangs:
        watch.wait(60)
        return
    with pytest.raises(HeadHangs, match="SHARDLINE_STALL_S"):
        watch.wait(60)


def test_the_stall_shrinks_with_all_other_times() -> None:
    assert StageSettings(model="m", time_scale=0.1).times == Times().scaled(0.1)
    assert StageSettings(model="m", stall_s=60, time_scale=0.5).times.stall_s == 30.0
