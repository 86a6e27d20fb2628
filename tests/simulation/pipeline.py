"""A pipeline without a model: a scheduler, stages that obey it, and what it tells of each job."""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import replace
from typing import Any

from shardline.contract.job import FinishReason, PromptLogprob, SamplingParams
from shardline_scheduler.events import (
    Event,
    KvExceeded,
    MayBegin,
    NewTokens,
    SequenceCrashed,
    SequenceFailed,
    SequenceFinished,
)
from shardline_scheduler.kv_blocks import BLOCK_TOKENS
from shardline_scheduler.offload import OffloadTerms
from shardline_scheduler.scheduler import Scheduler
from shardline_scheduler.scheduler_config import SchedulerConfig
from shardline_scheduler.sequence import Key, Request
from shardline_scheduler.step_plan import Row, StepPlan, StepResult
from tests.simulation.stages import EOS, NUM_TOKENS, REPEATS, Stages, next_token, prompt_score


class Numbers:
    """A token sink: a token's text is its number. Ends at EOS or after `limit` tokens."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_tokens = 0
        self.parts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def push(self, token_id: int) -> tuple[str, FinishReason | None]:
        self.num_tokens += 1
        self.parts.append(f"{token_id} ")
        if token_id == EOS:
            return self.parts[-1], FinishReason.STOP
        return self.parts[-1], FinishReason.LENGTH if self.num_tokens >= self.limit else None

    def flush(self) -> str:
        return ""


def expected_output(request: Request, limit: int) -> list[int]:
    """What an undisturbed run gives."""
    ids = list(request.prompt_ids)
    while len(ids) - len(request.prompt_ids) < limit:
        ids.append(next_token(ids, request.seed))
        if ids[-1] == EOS:
            break
    return ids[len(request.prompt_ids) :]


def expected_scores(request: Request) -> tuple[PromptLogprob | None, ...] | None:
    """What an undisturbed run tells of the prompt."""
    if request.params.prompt_logprobs is None:
        return None
    ids = list(request.prompt_ids)
    return (None, *(prompt_score(ids, place) for place in range(1, len(ids))))


def config(**changes: Any) -> SchedulerConfig:
    """A roomy scheduler, except for what a test names."""
    roomy = SchedulerConfig(num_blocks=100, max_seats=8, token_budget=256, num_lanes=1, max_len=512)
    return replace(roomy, **changes)


def request(
    name: str = "a",
    *,
    num_prompt: int = 5,
    max_tokens: int = 1000,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    num_common: int = 0,
    repeats: bool = False,
    **fields: Any,
) -> Request:
    """A request whose prompt and seed follow from its name; the first `num_common` ids are those of
    all that have as many. The output of one that `repeats` can be guessed, mostly."""
    seed = zlib.crc32(name.encode())
    common = [(7 * place + 1) % NUM_TOKENS for place in range(min(num_common, num_prompt))]
    return Request(
        key=(name, 1),
        prompt_ids=(
            *common,
            *((seed + place) % NUM_TOKENS for place in range(len(common), num_prompt)),
        ),
        params=SamplingParams(
            max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs
        ),
        seed=seed + REPEATS * repeats,
        **fields,
    )


class Pipeline:
    """A scheduler with its stages, and what it told about each job. Steps are answered when
    `deliver` is called."""

    def __init__(self, settings: SchedulerConfig) -> None:
        self.scheduler = Scheduler(settings)
        self.stages = _stages(settings)
        self.flights: deque[tuple[StepPlan, StepResult, frozenset[int]]] = deque()
        self.outputs: dict[Key, list[int]] = {}
        self.texts: dict[Key, str] = {}
        self.ends: dict[Key, SequenceFinished | SequenceFailed | SequenceCrashed | KvExceeded] = {}
        self.called: list[Key] = []
        """Parked jobs there was room for; they begin with the next turn."""

    def add(self, job: Request) -> None:
        """Adds a request."""
        self.outputs[job.key] = list(job.output_ids)
        self.texts[job.key] = "".join(f"{token} " for token in job.output_ids)
        self.hear(self.scheduler.add(job, Numbers(job.params.max_tokens or 1)))

    def schedule(self, bad: tuple[int, ...] = ()) -> StepPlan | None:
        """One step, run by the stages at once; its answer waits."""
        plan = self.scheduler.schedule()
        if plan is not None:
            busy = frozenset[int]().union(*(blocks for _, _, blocks in self.flights))
            assert busy.isdisjoint(block for row in plan.rows for block in written(plan, row)), (
                "a block in use is given away"
            )
            before = {row.seq: self.stages.tables.get(row.seq) for row in plan.rows}
            result = self.stages.run(plan, bad)
            tables = [before[row.seq] or self.stages.tables.get(row.seq) for row in plan.rows]
            used = frozenset(
                block for table in tables if table is not None for block in table.blocks
            )
            self.flights.append((plan, result, used))
        self.hear(self.scheduler.may_begin())
        return plan

    def deliver(self) -> list[Event]:
        """The answer to the oldest step in flight."""
        events = self.scheduler.apply(self.flights.popleft()[1])
        self.hear(events)
        return events

    def abort(self, key: Key) -> SequenceFinished | None:
        """Cancels a job."""
        finished = self.scheduler.abort(key)
        if finished is not None:
            self.hear([finished])
        return finished

    def rebuild(
        self, num_blocks: int, num_lanes: int | None = None, offload: OffloadTerms | None = None
    ) -> None:
        """A new epoch with new stages."""
        self.flights.clear()
        self.hear(self.scheduler.rebuild(num_blocks, num_lanes, offload))
        self.stages = _stages(self.scheduler.config)

    def turn(self) -> None:
        """A step, and an answer once no further step can go out."""
        while self.called:
            self.scheduler.begin(self.called.pop())
        if self.schedule() is None and not self.called:
            self.deliver()

    def drain(self) -> None:
        """Runs until everything ended."""
        while not self.scheduler.idle:
            self.turn()
        assert self.scheduler.schedule() is None
        assert not self.stages.tables, "every sequence was closed"
        assert (self.scheduler.blocks_used, self.scheduler.slots_used) == (0, 0)
        assert (
            self.scheduler.num_running,
            self.scheduler.num_waiting,
            self.scheduler.num_in_flight,
        ) == (0, 0, 0)

    def hear(self, events: list[Event]) -> None:
        """Checks that what is told of each job fits together."""
        for event in events:
            assert event.key not in self.ends, "nothing follows the end"
            if isinstance(event, NewTokens):
                assert event.start == len(self.outputs[event.key])
                self.outputs[event.key].extend(event.ids)
                self.texts[event.key] += event.text
                continue
            if isinstance(event, MayBegin):
                self.called.append(event.key)
                continue
            self.ends[event.key] = event
            assert not self.scheduler.has(event.key)
            if isinstance(event, SequenceFinished):
                assert list(event.output_ids) == self.outputs[event.key]
                assert event.text == self.texts[event.key]


def _stages(settings: SchedulerConfig) -> Stages:
    num_slots = settings.offload.num_slots
    return Stages(settings.num_blocks, num_slots, settings.max_adapters, settings.num_states)


def written(plan: StepPlan, row: Row) -> tuple[int, ...]:
    """The blocks that a row brings, without those that its sequence found filled."""
    num_cached = next((opened.num_cached for opened in plan.opens if opened.seq == row.seq), 0)
    return row.blocks[num_cached // BLOCK_TOKENS :]


def shape(plan: StepPlan | None) -> list[tuple[int, int, int]]:
    """(sequence, start, length) of each row."""
    assert plan is not None
    return [(row.seq, row.start, row.length) for row in plan.rows]


def checked(plan: StepPlan | None) -> StepPlan:
    """There is a step to run."""
    assert plan is not None
    return plan


def decoding(
    pipeline: Pipeline, *names: str, num_prompt: int = 5, max_tokens: int = 400, **fields: Any
) -> None:
    """Adds jobs and computes their prompts: each has one output token and nothing is in flight."""
    for name in names:
        pipeline.add(request(name, num_prompt=num_prompt, max_tokens=max_tokens, **fields))
    while any(len(pipeline.outputs[name, 1]) == 0 for name in names):
        pipeline.schedule()
        pipeline.deliver()
