"""Steps in flight over slow links: tokens/s with as many lanes as stages, and with those that a
head chooses.

    python -m tests.benchmarks.lanes [--delay-ms 0 20 100 200] [--step-ms 20] [--row-ms 0.5]
    [--prompts 64]

Two stages wait instead of computing, as long as a step of so many rows is said to take: a busy
machine disturbs little. Scheduler, engines and hops are the product's; frames go through a proxy,
which holds each one for the delay.
"""

from __future__ import annotations

import argparse
import queue
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import torch
from torch import Tensor

from services.stage.engine.engine import Engine, FollowerEngine
from services.stage.engine.head_engine import HeadEngine
from services.stage.hop import Kind
from services.stage.pipeline.pace import Pace
from shardline.contract.fleet.lanes import lanes_for
from shardline_scheduler.events import Event, SequenceFinished
from shardline_scheduler.scheduler import Scheduler
from shardline_scheduler.scheduler_config import SchedulerConfig
from shardline_scheduler.sequence import Request
from shardline_scheduler.step_plan import StepPlan, StepResult
from tests.benchmarks.bare import TOKEN_BUDGET
from tests.benchmarks.bare_stages import CONNECT_S, channel, delayed, hop_in, wiring
from tests.benchmarks.workload import NEW_TOKENS, PARAMS, workload
from tests.chain import CountingSink

PIPELINE = UUID(int=1)
NUM_STAGES = 2
NUM_BLOCKS = 4096
HIDDEN = 1024
PATIENCE_S = 600.0


class WaitingStage:
    """An executor that waits as long as its steps take."""

    dtype = torch.bfloat16

    def __init__(self, step_s: float, row_s: float, *, is_last: bool) -> None:
        self._step_s = step_s
        self._row_s = row_s
        self._is_last = is_last
        self._never = threading.Event()

    def enter_thread(self) -> None:
        """No device."""

    def reset(self) -> None:
        """No KV."""

    def staging(self, num_buffers: int) -> None:
        """No accelerator."""

    def run(self, plan: StepPlan, _hidden: Tensor | None) -> Tensor | StepResult:
        """One step: states bfloat16 [T, H], or a token for each row that wants one."""
        seconds = self._step_s + self._row_s * plan.num_tokens
        self._never.wait(seconds)
        if self._is_last:
            return StepResult(plan.step, ((7,),) * plan.num_wanting, compute_s=seconds)
        return torch.zeros(plan.num_tokens, HIDDEN, dtype=self.dtype)


class FarPipeline:
    """A head and a tail, wired through proxies."""

    def __init__(
        self, folder: Path, options: argparse.Namespace, delay_s: float, *, follows_links: bool
    ) -> None:
        self._delay_s = delay_s
        self._follows_links = follows_links
        self._ended: queue.Queue[str] = queue.Queue()
        self._paces = [Pace() for _ in range(NUM_STAGES)]
        head, tail = (
            cast(Any, WaitingStage(options.step_ms / 1e3, options.row_ms / 1e3, is_last=is_last))
            for is_last in (False, True)
        )
        self._scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=NUM_BLOCKS,
                max_seats=options.prompts,
                token_budget=TOKEN_BUDGET,
                num_lanes=1,
                max_len=1024,
            )
        )
        self._head = HeadEngine(
            head, self._scheduler, emit=self._emit, on_lost=_ignore, on_step=self._choose
        )
        self._engines: list[Engine] = [self._head, FollowerEngine(tail, on_lost=_ignore)]
        hop = hop_in(folder, delay_s)
        plans, results = (
            hop.open_receiver(channel(PIPELINE, kind)) for kind in (Kind.PLAN, Kind.RESULT)
        )
        for index, engine in enumerate(self._engines):
            receiver, kind, to = ((results, Kind.PLAN, plans), (plans, Kind.RESULT, results))[index]
            sender = hop.open_sender(
                channel(PIPELINE, kind), delayed(to.address, delay_s), CONNECT_S
            )
            ends: dict[str, Any] = {"receiver": receiver, "sender": sender}
            ours = wiring(
                PIPELINE, stage_index=index, num_stages=NUM_STAGES, num_blocks=NUM_BLOCKS, **ends
            )
            engine.wire(replace(ours, first_lanes=NUM_STAGES))
            engine.start()

    def run(self, prompts: Sequence[tuple[int, ...]]) -> float:
        """Output tokens/s of these."""
        began_s = time.perf_counter()
        for index, prompt in enumerate(prompts):
            request = Request(key=(str(index), 0), prompt_ids=prompt, params=PARAMS, seed=index)
            self._head.add(request, CountingSink(NEW_TOKENS))
        for _ in prompts:
            self._ended.get(timeout=PATIENCE_S)
        return len(prompts) * NEW_TOKENS / (time.perf_counter() - began_s)

    @property
    def num_lanes(self) -> int:
        """Now."""
        return self._scheduler.config.num_lanes

    def close(self) -> None:
        """Ends both engines."""
        for engine in self._engines:
            engine.stop()
        for engine in self._engines:
            engine.join()

    def _emit(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, SequenceFinished):
                self._ended.put(event.key[0])

    def _choose(self, *_: object) -> None:
        """As a pipeline's monitor does, which pings its stages."""
        for pace, engine in zip(self._paces, self._engines, strict=True):
            pace.note_steps(
                engine.progress.num_steps, engine.progress.compute_s + engine.progress.hop_s
            )
        if self._follows_links:
            step_s = max(pace.step_s for pace in self._paces)
            self._head.use_lanes(lanes_for(NUM_STAGES, NUM_STAGES * self._delay_s, step_s))


@contextmanager
def pipeline(
    options: argparse.Namespace, delay_s: float, *, follows_links: bool
) -> Iterator[FarPipeline]:
    """While entered, it runs."""
    with tempfile.TemporaryDirectory(prefix="shardline-lanes-") as folder:
        found = FarPipeline(Path(folder), options, delay_s, follows_links=follows_links)
        yield found
        found.close()


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--delay-ms", type=float, nargs="+", default=[0.0, 20.0, 100.0, 200.0], help="of each frame"
    )
    parser.add_argument(
        "--step-ms", type=float, default=20.0, help="of a step in one stage, whatever its rows"
    )
    parser.add_argument("--row-ms", type=float, default=0.5, help="more, for each row")
    parser.add_argument("--prompts", type=int, default=64, help="requests at a time")
    options = parser.parse_args()
    print(
        "| a frame is under way for | lanes | tokens/s | tokens/s with two lanes | ratio |\n"
        "|---|---|---|---|---|"
    )
    for delay_ms in options.delay_ms:
        speeds = []
        lanes = 0
        for follows_links in (False, True):
            with pipeline(options, delay_ms / 1e3, follows_links=follows_links) as found:
                speeds.append(found.run(workload(options.prompts).prompts))
                lanes = found.num_lanes
        two, chosen = speeds
        print(
            f"| {delay_ms:g} ms | {lanes} | {chosen:.0f} | {two:.0f} | {chosen / two:.2f} |",
            flush=True,
        )


def _ignore(_epoch: int, _reason: str) -> None:
    """Of two engines that stop, one may see the other go. Before, nothing ends any more."""


if __name__ == "__main__":
    main()
