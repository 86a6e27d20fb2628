"""The bare engine: the stages of one pipeline as processes wired by hand, without Celery, Redis,
Postgres or HTTP.

python -m tests.benchmarks.bare --model DIR --dtype bfloat16 --device cpu:0 --device cpu:1
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from tokenizers import Tokenizer

from services.stage.engine.head_engine import HeadEngine
from services.stage.hop import Kind, Receiver, Sender
from services.stage.hop.wiring import Wiring
from services.stage.model.model_info import ModelInfo
from services.stage.pipeline.pace import NUM_STEPS, Pace
from services.stage.settings import StageSettings
from shardline.contract.fleet.lanes import lanes_for
from shardline_scheduler.events import NewTokens, SequenceFinished
from shardline_scheduler.offload import OffloadTerms
from shardline_scheduler.scheduler import Scheduler
from shardline_scheduler.scheduler_config import SchedulerConfig
from shardline_scheduler.sequence import Request
from shardline_scheduler.step_plan import StepPlan
from shardline_scheduler.step_times import StepTime
from shardline_server.host.threads import run_in_fresh_thread
from shardline_server.tokenize import CompletionText, Vocabulary
from tests.benchmarks.bare_stages import (
    CONNECT_S,
    Spent,
    abort,
    channel,
    delayed,
    environment_of,
    hop_in,
    load,
    log_to_stderr,
    serve_later,
    wiring,
)
from tests.benchmarks.workload import PARAMS, WARM_UP_PROMPTS, Workload, copying, workload

TOKEN_BUDGET: int = StageSettings.model_fields["token_budget"].default
PROMPT_LOOKUP: int = StageSettings.model_fields["prompt_lookup"].default
"""Rows of a step up to which drafts are made."""


def parser() -> argparse.ArgumentParser:
    """Its options."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", required=True)
    options.add_argument(
        "--dtype", action="append", help="one for all stages, or one for each; default: float32"
    )
    options.add_argument(
        "--env",
        action="append",
        default=[],
        help="of a later stage, such as 1:ONEDNN_MAX_CPU_ISA=AVX2; empty: unset",
    )
    options.add_argument(
        "--device", action="append", required=True, help="one for each stage, in order"
    )
    options.add_argument("--prompts", type=int, default=64)
    options.add_argument("--seats", type=int, default=64)
    options.add_argument("--token-budget", type=int, default=TOKEN_BUDGET, help="rows of a step")
    options.add_argument("--runs", type=int, default=3)
    options.add_argument(
        "--split", help="layers of the stages, such as 0-6,7-11; default: as `make up` splits them"
    )
    options.add_argument(
        "--hop-delay-ms", type=float, default=0.0, help="each hop takes so long, through a proxy"
    )
    options.add_argument(
        "--lanes", type=int, help="steps in flight; default: as a head chooses them"
    )
    options.add_argument(
        "--hop-activations", choices=["same", "int8"], default="same", help="what hops carry"
    )
    options.add_argument(
        "--common",
        type=int,
        default=0,
        help="first tokens that all prompts of a run have in common",
    )
    options.add_argument(
        "--copy",
        action="store_true",
        help="prompts that hold their answer, for a model that copies",
    )
    _add_stage_options(options)
    return options


def _add_stage_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--prefix-cache", action=argparse.BooleanOptionalAction, default=True)
    options.add_argument(
        "--prompt-lookup", type=int, default=PROMPT_LOOKUP, help="rows up to which drafts are made"
    )
    options.add_argument(
        "--kv-bytes", type=int, help="of each stage; default: as a stage decides it"
    )
    options.add_argument(
        "--gpu-products",
        choices=["auto", "torch", "triton"],
        default="auto",
        help="of stages on GPUs",
    )
    options.add_argument(
        "--cuda-graphs",
        action=argparse.BooleanOptionalAction,
        help="record steps of stages on GPUs; default: where that can be",
    )
    options.add_argument(
        "--kv-offload-mib", type=int, default=0, help="of each stage, for KV of preempted sequences"
    )
    options.add_argument(
        "--kv-offload-dir", type=Path, help="folder of a file for it; default: memory"
    )


def main() -> None:
    """Prints as one JSON line: output tokens/s of each run, and each stage's bubble share over all
    of them."""
    log_to_stderr()
    options = parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="shardline-bare-") as folder:
        pipeline = Pipeline(Path(folder), options)
        try:
            pipeline.run(workload(WARM_UP_PROMPTS))
            works = [work_of(options, 1 + run) for run in range(options.runs)]
            before = pipeline.spent()
            speeds = [pipeline.run(work) for work in works]
            spent = [now.since(then) for now, then in zip(pipeline.spent(), before, strict=True)]
        finally:
            pipeline.close()
    run = {
        "tokens_per_s": speeds,
        "devices": options.device,
        "seats": options.seats,
        "attention": pipeline.attention_kind,
        "exact": pipeline.exact,
        "compute_s": [each.compute_s for each in spent],
        "bubble_share": [each.bubble_share for each in spent],
        "drafted": pipeline.num_drafted,
        "accepted": pipeline.num_accepted,
        "computed_tokens": pipeline.num_computed,
        "restored_blocks": pipeline.num_restored,
        "lanes": pipeline.num_lanes,
    }
    print(json.dumps(run))


def work_of(options: argparse.Namespace, run: int) -> Workload:
    """What one run computes."""
    num = options.prompts
    common = options.common
    return copying(num, run=run) if options.copy else workload(num, run=run, num_common=common)


class Pipeline:
    """The head runs in this process, the later stages in their own."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.identity = uuid4()
        num_stages = len(options.device)
        self._delay_s = options.hop_delay_ms / 1e3
        self._may_choose_lanes = options.lanes is None
        spawn = multiprocessing.get_context("spawn")
        self._later = []
        self._paces = [Pace() for _ in options.device]
        for stage_index in range(1, num_stages):
            ours, theirs = spawn.Pipe()
            given = theirs, folder, options, stage_index, self.identity
            process = spawn.Process(target=serve_later, args=given, daemon=True)
            with environment_of(options, stage_index):
                process.start()
            theirs.close()  # a stage that ends early is an error here, not a wait
            self._later.append((process, ours))
        executor = run_in_fresh_thread(partial(load, options, 0, folder))
        self.attention_kind = executor.attention_kind
        self.exact = executor.exact
        """Of the head."""
        capacities = [
            (executor.num_blocks, executor.offload, executor.num_states),
            *(pipe.recv() for _, pipe in self._later),
        ]
        num_blocks, offload, num_states = least(capacities)
        self._scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=num_blocks,
                max_seats=options.seats,
                token_budget=options.token_budget,
                num_lanes=options.lanes or num_stages,
                max_len=executor.info.context_length,
                prefix_cache=options.prefix_cache,
                prompt_lookup=options.prompt_lookup,
            )
        )
        self._ended: multiprocessing.queues.SimpleQueue[str] = spawn.SimpleQueue()
        self.num_drafted = self.num_accepted = 0
        """Guesses of prompt lookup, warm-up included."""
        self.num_computed = self.num_restored = 0
        """Packed rows, and KV blocks that came back from the offload area, warm-up included."""
        self._engine = HeadEngine(
            executor, self._scheduler, emit=self._emit, on_lost=abort, on_step=self._count
        )
        # The folder of a GGUF file has the tokenizer of its header.
        tokenizer = Tokenizer.from_file(str(ModelInfo.read(options.model).path / "tokenizer.json"))
        self._vocabulary = Vocabulary(tokenizer, executor.info.eos_ids)
        wired = self._wire(folder, num_stages, num_blocks, offload)
        sends_int8 = options.hop_activations == "int8"
        self._engine.wire(
            replace(
                wired,
                sends_int8=sends_int8,
                first_lanes=options.lanes or num_stages,
                num_states=num_states,
            )
        )
        self._engine.start()

    def run(self, work: Workload) -> float:
        """Output tokens/s of one workload."""
        began_s = time.perf_counter()
        for index, prompt in enumerate(work.prompts):
            request = Request(key=(str(index), 0), prompt_ids=prompt, params=PARAMS, seed=index)
            self._engine.add(request, CompletionText(self._vocabulary, PARAMS, room=512))
        for _ in work.prompts:
            self._ended.get()
        return work.num_output_tokens / (time.perf_counter() - began_s)

    @property
    def num_lanes(self) -> int:
        """Steps in flight at most, now."""
        return self._scheduler.config.num_lanes

    def _choose_lanes(self) -> None:
        """As a pipeline's monitor does, which pings its stages."""
        now = self.spent()
        for pace, spent in zip(self._paces, now, strict=True):
            pace.note_steps(self._engine.num_steps, spent.compute_s + spent.hop_s)
        step_s = max(pace.step_s for pace in self._paces)
        self._engine.use_lanes(lanes_for(len(now), len(now) * self._delay_s, step_s))

    def spent(self) -> list[Spent]:
        """What each stage has done with its time so far."""
        for _, pipe in self._later:
            pipe.send("spent")
        return [Spent.of(self._engine), *(pipe.recv() for _, pipe in self._later)]

    def close(self) -> None:
        """Ends the head's engine, then the later stages."""
        self._engine.stop()
        self._engine.join()
        for process, _ in self._later:
            process.kill()
            process.join()

    def _emit(self, events: object) -> None:
        assert isinstance(events, list)
        for event in events:
            if isinstance(event, NewTokens):
                self.num_accepted += len(event.ids) - 1
            if isinstance(event, SequenceFinished):
                self._ended.put(event.key[0])

    def _count(self, plan: StepPlan, _time: StepTime) -> None:
        self.num_drafted += plan.num_drafts
        self.num_computed += plan.num_tokens
        self.num_restored += sum(not move.is_out for move in plan.moves)
        if self._may_choose_lanes and self._engine.num_steps % NUM_STEPS == 0:
            self._choose_lanes()

    def _wire(
        self, folder: Path, num_stages: int, num_blocks: int, offload: OffloadTerms
    ) -> Wiring:
        sender: Sender | None = None
        receiver: Receiver | None = None
        if num_stages > 1:
            hop = hop_in(folder, self._delay_s)
            receiver = hop.open_receiver(channel(self.identity, Kind.RESULT))
            addresses = [*(pipe.recv() for _, pipe in self._later), receiver.address]
            for (_, pipe), address in zip(self._later, addresses[1:], strict=True):
                pipe.send((address, num_blocks))
            address = delayed(addresses[0], self._delay_s)
            sender = hop.open_sender(channel(self.identity, Kind.PLAN), address, CONNECT_S)
        ends: dict[str, Any] = {"receiver": receiver, "sender": sender}
        ours = wiring(
            self.identity, stage_index=0, num_stages=num_stages, num_blocks=num_blocks, **ends
        )
        return replace(ours, num_slots=offload.num_slots, move_s=offload.move_s)


def least(capacities: Sequence[tuple[int, OffloadTerms, int]]) -> tuple[int, OffloadTerms, int]:
    """What all stages have: blocks, the offload, and states where layers are recurrent."""
    num_blocks, terms, num_states = zip(*capacities, strict=True)
    offload = OffloadTerms(
        num_slots=min(each.num_slots for each in terms),
        move_s=max(each.move_s for each in terms),
    )
    return min(num_blocks), offload, min((num for num in num_states if num), default=0)


if __name__ == "__main__":
    main()
