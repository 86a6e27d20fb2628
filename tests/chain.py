"""Stages chained in one process and driven by the real scheduler: what a pipeline computes, without
hops."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
from torch import Tensor

from services.stage.device.device import Device
from services.stage.engine.executor import Executor
from services.stage.engine.memory import Limits
from services.stage.engine.tensors import name_of, tensor_of, view_of
from services.stage.hop import Frame, Kind
from services.stage.model.model_info import ModelInfo
from shardline.contract.fleet.split import even_split
from shardline.contract.job import FinishReason, SamplingParams
from shardline_scheduler.events import NewTokens, SequenceFailed, SequenceFinished
from shardline_scheduler.offload import NO_OFFLOAD, OffloadTerms
from shardline_scheduler.scheduler import Scheduler
from shardline_scheduler.scheduler_config import SchedulerConfig
from shardline_scheduler.sequence import Request
from shardline_scheduler.step_plan import Move, StepPlan, StepResult, decode_plan, encode

KV_BYTES = 16 * 2**20
MAX_OPEN = 64
MAX_BUDGET = 512
LOOKUP_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """KV that does not hold what runs, and slots for some of it."""

    num_blocks: int
    num_slots: int
    moves: list[Move] = field(default_factory=list)
    """Those that plans carried."""
    opened: list[int] = field(default_factory=list)
    """The numbers of sequences: a preempted one gets another."""


@dataclass(slots=True)
class Guesses:
    """Of prompt lookup."""

    num_made: int = 0
    num_true: int = 0


class CountingSink:
    """Ends a completion after so many tokens; makes no text."""

    def __init__(self, num_tokens: int) -> None:
        self._left = num_tokens
        self.text = ""

    def push(self, _token: int, /) -> tuple[str, FinishReason | None]:
        """One token more."""
        self._left -= 1
        return "", FinishReason.LENGTH if self._left == 0 else None

    def flush(self) -> str:
        """Nothing is held back."""
        return ""


def load_chain(
    path: Path,
    num_stages: int,
    device: Device,
    cache_folder: Path,
    *,
    dtype: str = "float32",
    kv_bytes: int = KV_BYTES,
    max_open: int = MAX_OPEN,
    **further: Any,
) -> list[Executor]:
    """A whole model as so many stages, evenly split. `further` are other limits."""
    info = ModelInfo.read(path, cache_folder=cache_folder)
    return [
        Executor.load(
            model=info,
            layers=layers,
            device=device,
            dtype=dtype,
            limits=Limits(kv_bytes=kv_bytes, token_budget=MAX_BUDGET, max_open=max_open, **further),
            cache_folder=cache_folder,
        )
        for layers in even_split(info.num_layers, num_stages)
    ]


def requests(
    prompts: Iterable[Sequence[int]], params: SamplingParams, *, output_ids: tuple[int, ...] = ()
) -> list[Request]:
    """One request per prompt, with its place as its seed."""
    return [
        Request(
            key=(str(place), 1),
            prompt_ids=tuple(prompt),
            params=params,
            seed=place,
            output_ids=output_ids,
        )
        for place, prompt in enumerate(prompts)
    ]


def with_adapters(
    stages: Sequence[Executor], wanted: Sequence[Request], *names: str | None
) -> list[Request]:
    """The requests, each with the next of these adapters."""
    return [
        replace(
            one,
            params=msgspec.structs.replace(one.params, adapter=name),
            adapter="" if name is None else stages[0].adapters.get(name).fingerprint,
        )
        for one, name in zip(wanted, cycle(names), strict=False)
    ]


def generate(
    stages: Sequence[Executor], wanted: Sequence[Request], *, budget: int, seats: int = 32
) -> list[tuple[int, ...]]:
    """The output ids of each request, all of them run together. Leaves every stage without open
    sequences."""
    return [ended.output_ids for ended in complete(stages, wanted, budget=budget, seats=seats)]


def complete(
    stages: Sequence[Executor],
    wanted: Sequence[Request],
    *,
    budget: int,
    seats: int,
    prefix_cache: bool = True,
    guesses: Guesses | None = None,
    pressure: Pressure | None = None,
) -> list[SequenceFinished]:
    """The end of each request, with log-probabilities where they were asked for. With prompt lookup
    if its guesses are to be counted, with offload if there is pressure."""
    num_blocks = min(stage.num_blocks for stage in stages)
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=pressure.num_blocks if pressure else num_blocks,
            max_seats=seats,
            token_budget=budget,
            num_lanes=len(stages),
            max_len=stages[0].info.context_length,
            prefix_cache=prefix_cache,
            max_adapters=stages[0].max_adapters,
            prompt_lookup=0 if guesses is None else LOOKUP_ROWS,
            offload=OffloadTerms(num_slots=pressure.num_slots) if pressure else NO_OFFLOAD,
            num_states=min((each.num_states for each in stages if each.num_states), default=0),
        )
    )
    chain = Chain(stages)
    for stage in stages:
        stage.reset()
    for request in wanted:
        assert request.params.max_tokens is not None
        assert not scheduler.add(request, CountingSink(request.params.max_tokens)), (
            "it ended before it began"
        )
    done: dict[str, SequenceFinished] = {}
    in_flight: deque[StepPlan] = deque()
    while not scheduler.idle:
        while (plan := scheduler.schedule()) is not None:
            in_flight.append(plan)
            if guesses is not None:
                guesses.num_made += plan.num_drafts
            if pressure is not None:
                pressure.moves.extend(plan.moves)
                pressure.opened.extend(each.seq for each in plan.opens)
        for event in scheduler.apply(chain.run(in_flight.popleft())):
            assert not isinstance(event, SequenceFailed), event.reason
            if guesses is not None and isinstance(event, NewTokens):
                guesses.num_true += len(event.ids) - 1
            if isinstance(event, SequenceFinished):
                done[event.key[0]] = event
    assert [stage.blocks_used for stage in stages] == [0] * len(stages)
    return [done[request.key[0]] for request in wanted]


class Chain:
    """Stages through which steps go one by one, plan and activations as the bytes that hops
    carry."""

    def __init__(self, stages: Sequence[Executor]) -> None:
        self._stages = [(stage, stage.staging(2)) for stage in stages]

    def run(self, plan: StepPlan) -> StepResult:
        """One step."""
        frame: Frame | None = None
        for stage, staging in self._stages:
            buffer = staging.buffer(plan.step) if staging else None
            hidden = tensor_of(frame, stage.dtype, buffer) if frame else None
            plan = stage.admit(decode_plan(encode(plan)))
            out = stage.run(plan, hidden)
            if isinstance(out, StepResult):
                return out
            if staging is not None:
                copy = staging.copy_out(plan.step, out)
                copy.wait()
                assert copy.tensor is not None
                out = copy.tensor
            frame = _frame(plan.step, out) if plan.rows else None
        raise AssertionError("the last stage samples")


def _frame(step: int, states: Tensor) -> Frame:
    shape = tuple(states.shape)
    dtype = name_of(states.dtype)
    of_step = partial(Frame, kind=Kind.PLAN, pipeline=UUID(int=0), epoch=0, step=step, message=b"")
    return of_step(tensor=view_of(states), dtype=dtype, shape=shape)


def run(stages: Sequence[Executor], plan: StepPlan) -> StepResult:
    """One step through all stages."""
    return Chain(stages).run(plan)
