"""Engines of one pipeline in this process, wired by hand over real sockets. Knows no control
link."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from services.stage.engine.engine import Engine, FollowerEngine
from services.stage.engine.executor import Executor
from services.stage.engine.head_engine import HeadEngine
from services.stage.hop import Channel, Kind, Receiver, Sender
from services.stage.hop.sockets import Sockets
from services.stage.hop.wiring import Wiring
from services.stage.hop.zeromq import ZeroMqHop
from shardline.base.config import Times
from shardline.contract.fleet.lanes import MAX_LANES
from shardline_scheduler.events import Event, SequenceFailed, SequenceFinished
from shardline_scheduler.scheduler import Scheduler
from shardline_scheduler.scheduler_config import SchedulerConfig
from shardline_scheduler.sequence import Request
from tests.chain import CountingSink

PIPELINE = UUID(int=1)
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Links:
    """Opens both ends of links."""

    sockets: Sockets
    num_lanes: int

    def open(self, kind: Kind, epoch: int) -> tuple[Sender, Receiver]:
        """The ends of one."""
        hop = ZeroMqHop(self.sockets, Times())
        channel = Channel(pipeline=PIPELINE, epoch=epoch, kind=kind, num_lanes=self.num_lanes)
        receiver = hop.open_receiver(channel)
        return hop.open_sender(channel, receiver.address, PATIENCE_S), receiver


@contextmanager
def open_links(folder: Path, num_lanes: int) -> Iterator[Links]:
    """A context with sockets in a folder."""
    sockets = Sockets(bind=f"ipc://{folder}")
    yield Links(sockets, num_lanes)
    sockets.close()


@dataclass(slots=True)
class Engines:
    """A head and its later stages, which run."""

    head: HeadEngine
    later: list[FollowerEngine]
    events: queue.Queue[Event]
    lost: list[str]

    def generate(self, requests: Sequence[Request]) -> list[tuple[int, ...]]:
        """The output ids of each request, all of them run together."""
        return [event.output_ids for event in self.finish(requests)]

    def finish(self, requests: Sequence[Request]) -> list[SequenceFinished]:
        """The end of each request, all of them run together and none failed."""
        ends: list[SequenceFinished] = []
        for end in self.ends(requests):
            assert not isinstance(end, SequenceFailed), end.reason
            ends.append(end)
        return ends

    def ends(self, requests: Sequence[Request]) -> list[SequenceFinished | SequenceFailed]:
        """How each request ends, all of them run together."""
        for request in requests:
            assert request.params.max_tokens is not None
            self.head.add(request, CountingSink(request.params.max_tokens))
        done: dict[str, SequenceFinished | SequenceFailed] = {}
        while len(done) < len(requests):
            event = self.events.get(timeout=PATIENCE_S)
            if isinstance(event, SequenceFinished | SequenceFailed):
                done[event.key[0]] = event
        assert not self.lost
        return [done[request.key[0]] for request in requests]


def wiring(
    executors: Sequence[Executor],
    index: int,
    links: Links,
    ends: tuple[Receiver, Sender],
    sends_int8: bool,
) -> Wiring:
    """Of one stage, in epoch 1."""
    return Wiring(
        pipeline=PIPELINE,
        epoch=1,
        stage_index=index,
        num_stages=len(executors),
        num_lanes=links.num_lanes,
        num_blocks=min(executor.num_blocks for executor in executors),
        receiver=ends[0],
        sender=ends[1],
        sends_int8=sends_int8,
        first_lanes=len(executors),
    )


@contextmanager
def open_engines(
    executors: Sequence[Executor], folder: Path, *, budget: int, sends_int8: bool = False
) -> Iterator[Engines]:
    """A context with engines of two or more stages, whose epoch has begun."""
    first, *rest = executors
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=min(executor.num_blocks for executor in executors),
            max_seats=32,
            token_budget=budget,
            num_lanes=len(executors),
            max_len=first.info.context_length,
            max_adapters=first.max_adapters,
        )
    )
    lost: list[str] = []
    events: queue.Queue[Event] = queue.Queue()

    def emit(found: Sequence[Event]) -> None:
        for event in found:
            events.put(event)

    options: Any = {"on_lost": lambda _, reason: lost.append(reason)}
    head = HeadEngine(first, scheduler, emit=emit, **options)
    later = [FollowerEngine(executor, **options) for executor in rest]
    engines: list[Engine] = [head, *later]
    with open_links(folder, MAX_LANES) as links:
        kinds = [*[Kind.PLAN] * len(rest), Kind.RESULT]
        ends = [links.open(kind, epoch=1) for kind in kinds]
        for index, engine in enumerate(engines):
            engine.wire(
                wiring(executors, index, links, (ends[index - 1][1], ends[index][0]), sends_int8)
            )
            engine.start()
        yield Engines(head, later, events, lost)
        for engine in engines:
            engine.stop()
        for engine in engines:
            engine.join()
