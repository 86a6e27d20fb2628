"""The bare engine: the stages of one pipeline as processes wired by hand, without Celery, Redis,
Postgres or HTTP.

python -m tests.benchmarks.bare --model DIR --dtype bfloat16 --device cpu:0 --device cpu:1 --prompts
64 --seats 64
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Self
from uuid import UUID, uuid4

import structlog
from tokenizers import Tokenizer

from services.stage.device.accelerator import MODULE_FIELD, load_module
from services.stage.device.acquire import acquire
from services.stage.engine.accelerator_options import AcceleratorOptions
from services.stage.engine.engine import Engine, FollowerEngine, HeadEngine
from services.stage.engine.executor import Executor
from services.stage.engine.memory import Limits
from services.stage.hop import Channel, Hop, Kind, Receiver, Sender
from services.stage.hop.sockets import Sockets
from services.stage.hop.wiring import Wiring
from services.stage.hop.zeromq import ZeroMqHop
from services.stage.model.model_info import ModelInfo
from services.stage.pipeline.pace import NUM_STEPS, Pace
from services.stage.settings import StageSettings
from shardline.base.config import Times
from shardline.contract.lanes import MAX_LANES, lanes_for
from shardline.contract.split import even_split, parse_split
from shardline.host.threads import run_in_fresh_thread
from shardline.tokenize import CompletionText, Vocabulary
from shardline_scheduler.events import NewTokens, SequenceFinished
from shardline_scheduler.offload import OffloadTerms
from shardline_scheduler.scheduler import Scheduler
from shardline_scheduler.scheduler_config import SchedulerConfig
from shardline_scheduler.sequence import Request
from shardline_scheduler.step_plan import StepPlan
from shardline_scheduler.step_times import StepTime, bubble_share
from tests.benchmarks.workload import PARAMS, WARM_UP_PROMPTS, Workload, copying, workload
from tests.chaos.network.proxy import Proxy

TOKEN_BUDGET: int = StageSettings.model_fields["token_budget"].default
PROMPT_LOOKUP: int = StageSettings.model_fields["prompt_lookup"].default
"""Rows of a step up to which drafts are made."""
CONNECT_S = 60.0


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
    options.add_argument("--prefix-cache", action=argparse.BooleanOptionalAction, default=True)
    options.add_argument(
        "--prompt-lookup", type=int, default=PROMPT_LOOKUP, help="rows up to which drafts are made"
    )
    options.add_argument(
        "--kv-bytes", type=int, help="of each stage; default: as a stage decides it"
    )
    options.add_argument(
        "--gpu-products", choices=["torch", "triton"], default="torch", help="of stages on GPUs"
    )
    options.add_argument(
        "--cuda-graphs", action="store_true", help="record decode steps of stages on GPUs"
    )
    options.add_argument(
        "--kv-offload-mib", type=int, default=0, help="of each stage, for KV of preempted sequences"
    )
    options.add_argument(
        "--kv-offload-dir", type=Path, help="folder of a file for it; default: memory"
    )
    return options


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


def log_to_stderr() -> None:
    """Stdout is the figures' alone: processes that end at the same time write lines into each
    other."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))


class Spent(NamedTuple):
    """What a stage did with its time."""

    compute_s: float
    hop_s: float
    wait_s: float

    @classmethod
    def of(cls, engine: Engine) -> Self:
        """So far."""
        return cls(engine.progress.compute_s, engine.progress.hop_s, engine.progress.wait_s)

    def since(self, then: Spent) -> Spent:
        """Since that moment."""
        return Spent(*(mine - its for mine, its in zip(self, then, strict=True)))

    @property
    def bubble_share(self) -> float:
        """Of this time."""
        return bubble_share(*self)


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
            process = spawn.Process(
                target=serve_later,
                args=(theirs, folder, options, stage_index, self.identity),
                daemon=True,
            )
            with environment_of(options, stage_index):
                process.start()
            self._later.append((process, ours))
        executor = run_in_fresh_thread(partial(load, options, 0, folder))
        self.attention_kind = executor.attention_kind
        self.exact = executor.exact
        """Of the head."""
        capacities = [
            (executor.num_blocks, executor.offload),
            *(pipe.recv() for _, pipe in self._later),
        ]
        num_blocks = min(num_blocks for num_blocks, _ in capacities)
        offload = OffloadTerms(
            num_slots=min(terms.num_slots for _, terms in capacities),
            move_s=max(terms.move_s for _, terms in capacities),
        )
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
            executor, self._scheduler, emit=self._emit, on_lost=_abort, on_step=self._count
        )
        self._vocabulary = Vocabulary(
            Tokenizer.from_file(f"{options.model}/tokenizer.json"), executor.info.eos_ids
        )
        wired = self._wire(folder, num_stages, num_blocks, offload)
        sends_int8 = options.hop_activations == "int8"
        self._engine.wire(
            replace(wired, sends_int8=sends_int8, first_lanes=options.lanes or num_stages)
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


def serve_later(
    pipe: Connection, folder: Path, options: argparse.Namespace, stage_index: int, identity: UUID
) -> None:
    """A later stage's process: load, bind, connect, run and answer the head's process until
    killed."""
    log_to_stderr()
    num_stages = len(options.device)
    executor = run_in_fresh_thread(partial(load, options, stage_index, folder))
    pipe.send((executor.num_blocks, executor.offload))
    delay_s = options.hop_delay_ms / 1e3
    hop = hop_in(folder, delay_s)
    receiver = hop.open_receiver(channel(identity, Kind.PLAN))
    pipe.send(receiver.address)
    address, num_blocks = pipe.recv()
    kind = Kind.RESULT if stage_index == num_stages - 1 else Kind.PLAN
    sender = hop.open_sender(channel(identity, kind), delayed(address, delay_s), CONNECT_S)
    engine: Engine = FollowerEngine(executor, on_lost=_abort, name=f"stage-{stage_index}")
    ours = wiring(
        identity,
        stage_index=stage_index,
        num_stages=num_stages,
        num_blocks=num_blocks,
        receiver=receiver,
        sender=sender,
    )
    engine.wire(replace(ours, sends_int8=options.hop_activations == "int8"))
    engine.start()
    while pipe.recv():
        pipe.send(Spent.of(engine))


def load(options: argparse.Namespace, stage_index: int, folder: Path) -> Executor:
    """The executor of one stage, on its device, locked as in production."""
    load_module(os.environ.get(MODULE_FIELD))
    name = options.device[stage_index]
    worker = f"bare-{stage_index}"
    device = acquire(
        name, worker=worker, lock_folder=folder / "locks", shared=options.device.count(name) > 1
    )
    info = ModelInfo.read(options.model)
    return Executor.load(
        model=info,
        layers=split_of(options, info)[stage_index],
        device=device,
        dtype=dtype_of(options, stage_index),
        limits=Limits(
            kv_bytes=options.kv_bytes,
            offload_bytes=options.kv_offload_mib << 20,
            offload_folder=options.kv_offload_dir,
            token_budget=options.token_budget,
            max_open=2 * options.seats,
        ),
        cache_folder=StageSettings.model_fields["cache_dir"].default,
        on_accelerator=AcceleratorOptions(
            products=options.gpu_products, cuda_graphs=options.cuda_graphs
        ),
    )


def dtype_of(options: argparse.Namespace, stage_index: int) -> str:
    """The dtype of one stage."""
    dtypes = options.dtype or ["float32"]
    return str(dtypes[stage_index if len(dtypes) > 1 else 0])


@contextmanager
def environment_of(options: argparse.Namespace, stage_index: int) -> Iterator[None]:
    """While entered, what a process inherits that is started for this stage."""
    before = dict(os.environ)
    prefix = f"{stage_index}:"
    try:
        for text in options.env:
            if text.startswith(prefix):
                name, value = text.removeprefix(prefix).split("=", 1)
                os.environ.pop(name, None) if not value else os.environ.update({name: value})
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def split_of(options: argparse.Namespace, info: ModelInfo) -> list[range]:
    """The layers of each stage."""
    if options.split:
        return parse_split(options.split, info.num_layers)
    return even_split(info.num_layers, len(options.device))


def hop_in(folder: Path, delay_s: float) -> Hop:
    """Over ipc, as two stages of one host use it; a proxy needs tcp."""
    return ZeroMqHop(Sockets(bind="tcp://127.0.0.1" if delay_s else f"ipc://{folder}"), Times())


def delayed(address: str, delay_s: float) -> str:
    """The address of a proxy in this process, behind which is this one."""
    if not delay_s:
        return address
    host, port = address.removeprefix("tcp://").split(":")
    proxy = Proxy((host, int(port)))
    proxy.start()
    proxy.delay(delay_s)
    return f"tcp://{proxy.host}:{proxy.port}"


def channel(pipeline: UUID, kind: Kind) -> Channel:
    """Epoch 1 of a pipeline."""
    return Channel(pipeline=pipeline, epoch=1, kind=kind, num_lanes=MAX_LANES)


def wiring(
    pipeline: UUID,
    *,
    stage_index: int,
    num_stages: int,
    num_blocks: int,
    receiver: Receiver | None,
    sender: Sender | None,
) -> Wiring:
    """As the control links would make it."""
    return Wiring(
        pipeline=pipeline,
        epoch=1,
        stage_index=stage_index,
        num_stages=num_stages,
        num_lanes=MAX_LANES,
        num_blocks=num_blocks,
        receiver=receiver,
        sender=sender,
    )


def _abort(epoch: int, reason: str) -> None:
    print(f"bare pipeline broken in epoch {epoch}: {reason}", file=sys.stderr)
    os._exit(1)


if __name__ == "__main__":
    main()
