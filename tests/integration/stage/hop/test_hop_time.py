"""What a stage says of the time in its hops: of real frames on real sockets, by its control link,
at the head."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.stage.device.device import Device
from services.stage.engine.engine import FollowerEngine
from services.stage.engine.executor import Executor
from services.stage.engine.head_engine import HeadEngine
from services.stage.follower import Follower
from services.stage.hop.sockets import Sockets
from services.stage.hop.wiring import Wiring
from services.stage.pipeline.energy_writer import epoch_energy
from services.stage.pipeline.status import StageStatus
from shardline.contract.job import SamplingParams
from shardline.store.statistics.costs import EpochEnergy
from shardline_scheduler.events import Event, SequenceFailed, SequenceFinished
from shardline_scheduler.scheduler import Scheduler
from shardline_scheduler.scheduler_config import SchedulerConfig
from shardline_scheduler.sequence import Request
from shardline_scheduler.step_times import StepTime
from tests.chain import CountingSink, load_chain
from tests.links import NUM_LAYERS, PATIENCE_S, TIMES, Head, Stage, make_card, open_pipes
from tests.models import save_model
from tests.pinned import first_core
from tests.polling import until

MIDDLE = NUM_LAYERS // 2
WATTS = 20.0
"""Of the tail's device."""


class Tail(Stage):
    """A stage with its engine, and what a later stage's worker says of it."""

    def __init__(self, sockets: Sockets, executor: Executor) -> None:
        self.engine = FollowerEngine(executor, on_lost=lambda *_: None)
        loaded = SimpleNamespace(executor=executor, watts=WATTS)
        self._parts = SimpleNamespace(_engine=self.engine, _loaded=loaded)
        self.engine.start()
        super().__init__(sockets, make_card(MIDDLE, NUM_LAYERS, power="table"), TIMES)

    def close(self) -> None:
        super().close()
        self.engine.stop()
        self.engine.join()

    def wire(self, wiring: Wiring) -> None:
        self.engine.wire(wiring)

    def unwire(self) -> None:
        self.engine.unwire()

    def status(self) -> StageStatus:
        return Follower.status(cast(Any, self._parts))


@dataclass(slots=True, kw_only=True)
class Pair:
    """A head that generates through one later stage."""

    head: Head
    engine: HeadEngine
    tail: Tail
    events: queue.Queue[Event]
    began_s: float

    def generate(self, name: str, num_tokens: int) -> None:
        """One job, to its end."""
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
        self.engine.add(
            Request(key=(name, 1), prompt_ids=(5, 6, 7), params=params, seed=5),
            CountingSink(num_tokens),
        )
        while not isinstance(event := self.events.get(timeout=PATIENCE_S), SequenceFinished):
            assert not isinstance(event, SequenceFailed), event.reason

    def told(self) -> StageStatus:
        """What the head knows of the tail, once it has heard of its last step."""

        def status() -> StageStatus | None:
            (member,) = [each.status for each in self.head.pipeline.status().stages]
            return (
                member
                if member.num_steps == self.tail.engine.progress.num_steps and self._is_idle()
                else None
            )

        return cast(StageStatus, until(status))

    def _is_idle(self) -> bool:
        """The result of the last step has left, and its time is counted."""
        return self.tail.engine.progress.num_steps == self.engine.progress.num_steps


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    with first_core(tmp_path / "locks") as device:
        yield device


@pytest.fixture
def pair(device: Device, tmp_path: Path) -> Iterator[Pair]:
    first, last = load_chain(
        save_model(tmp_path, num_hidden_layers=NUM_LAYERS), 2, device, tmp_path / "cache"
    )
    events: queue.Queue[Event] = queue.Queue()
    began_s = time.perf_counter()
    with open_pipes(Sockets(bind="tcp://127.0.0.1")) as pipes:
        tail = Tail(pipes.sockets, last)
        pipes.stages.append(tail)
        head = pipes.head(MIDDLE)
        wiring = head.ready()
        scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=wiring.num_blocks,
                max_seats=4,
                token_budget=64,
                num_lanes=wiring.num_lanes,
                max_len=512,
            )
        )

        def emit(found: list[Event]) -> None:
            for event in found:
                events.put(event)

        engine = HeadEngine(first, scheduler, emit=cast(Any, emit), on_lost=lambda *_: None)
        engine.start()
        engine.wire(wiring)
        yield Pair(head=head, engine=engine, tail=tail, events=events, began_s=began_s)
        engine.stop()
        engine.join()


def test_a_head_tells_the_time_of_its_real_frames_through_a_tail(pair: Pair) -> None:
    assert pair.told().hop_us == 0, "no frame has come"

    pair.generate("first", 4)
    until(lambda: pair.told().hop_us > 0)
    first = pair.told()
    pair.generate("second", 4)
    until(lambda: pair.told().hop_us > first.hop_us)
    second = pair.told()

    assert second.num_steps > first.num_steps >= 4
    progress = pair.tail.engine.progress
    assert second.hop_us <= progress.hop_s * 1e6
    assert progress.hop_s + progress.compute_s <= time.perf_counter() - pair.began_s, (
        "no time is counted twice"
    )


def test_each_stage_tells_its_waits_and_its_bubble_share(pair: Pair) -> None:
    pair.generate("first", 4)
    idle_from_s = time.perf_counter()
    until(lambda: time.perf_counter() - idle_from_s > 0.5)
    pair.generate("second", 4)
    until(lambda: pair.told().num_steps == pair.engine.num_steps)
    told = pair.told()
    busy_s = time.perf_counter() - pair.began_s - 0.5
    for progress in (pair.engine.progress, pair.tail.engine.progress):
        assert progress.wait_s > 0, "with one sequence a stage waits while the other computes"
        assert progress.wait_s + progress.hop_s + progress.compute_s <= busy_s, (
            "idle time is counted for no stage"
        )
        assert 0 < progress.bubble_share < 1
    assert told.wait_us <= pair.tail.engine.progress.wait_s * 1e6
    assert told.bubble_share == pytest.approx(pair.tail.engine.progress.bubble_share, rel=1e-3)


def test_an_epoch_takes_what_each_stage_draws_while_it_computes(pair: Pair) -> None:
    def energy() -> EpochEnergy | None:
        status = pair.head.pipeline.status()
        return epoch_energy("p", status, pair.engine.progress, own_watts=5.0)

    until(pair.told)
    assert energy() is None, "nothing is computed"
    pair.generate("only", 4)
    until(lambda: pair.told().num_steps == pair.engine.num_steps)

    found = cast(EpochEnergy, energy())
    assert (found.source, found.num_rows) == ("table+unknown", 3 + 3)
    own = pair.engine.progress
    later = pair.tail.engine.progress
    both_j = 5.0 * own.compute_s + WATTS * later.compute_s
    assert found.energy_j == pytest.approx(both_j, rel=1e-3)


def test_both_stages_remember_the_same_steps(pair: Pair) -> None:
    pair.generate("only", 4)

    def both() -> tuple[list[StepTime], list[StepTime]] | None:
        first = pair.engine.clock.step_times.last()
        last = pair.tail.engine.clock.step_times.last()
        return (first, last) if len(first) == len(last) == pair.engine.num_steps else None

    first, last = cast(tuple[list[StepTime], list[StepTime]], until(both))
    assert [time.step for time in first] == [time.step for time in last] == list(range(len(first)))
    assert [time[-4:] for time in first] == [time[-4:] for time in last]
    assert [time.num_tokens for time in first if time.num_tokens] == [3, 1, 1, 1]
    computed_s = [time.compute_began_s + time.compute_s for time in first]
    assert all(head_s < time.began_s for head_s, time in zip(computed_s, last, strict=True)), (
        "one clock for a host"
    )
