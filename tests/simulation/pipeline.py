"""A pipeline without a model: it obeys StepPlans to the letter and asserts that they make sense.

Its cells hold token ids where KV would be, and the next token is a hash of the cells that a
sequence's block table reaches: a wrong table, a block used twice or a lost token changes the
output.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shardline.contract.job import FinishReason, PromptLogprob, SamplingParams, TokenLogprob
from shardline_scheduler.events import (
    Event,
    KvExceeded,
    MayBegin,
    NewTokens,
    SequenceCrashed,
    SequenceFailed,
    SequenceFinished,
)
from shardline_scheduler.kv_blocks import BLOCK_TOKENS, blocks_for
from shardline_scheduler.offload import OffloadTerms
from shardline_scheduler.scheduler import Scheduler
from shardline_scheduler.scheduler_config import SchedulerConfig
from shardline_scheduler.sequence import Key, Request
from shardline_scheduler.step_cutter import MAX_SCORED
from shardline_scheduler.step_plan import (
    Move,
    Open,
    Row,
    ScoredTokens,
    StepPlan,
    StepResult,
    decode_plan,
    decode_result,
    encode,
)

NUM_TOKENS = 100
"""Size of the vocabulary."""

EOS = 0
REPEATS = 1 << 32
ROUND = 5


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


def next_token(ids: list[int], seed: int) -> int:
    """The model. With `REPEATS` in its seed, three of four tokens are those of a round."""
    chance = zlib.crc32(np.array(ids, dtype=np.int32).tobytes(), seed % REPEATS)
    if seed >= REPEATS and chance % 4:
        return 1 + (seed + len(ids) % ROUND) % (NUM_TOKENS - 1)
    return chance % NUM_TOKENS


def expected_output(request: Request, limit: int) -> list[int]:
    """What an undisturbed run gives."""
    ids = list(request.prompt_ids)
    while len(ids) - len(request.prompt_ids) < limit:
        ids.append(next_token(ids, request.seed))
        if ids[-1] == EOS:
            break
    return ids[len(request.prompt_ids) :]


def prompt_score(ids: list[int], place: int) -> PromptLogprob:
    """What is told of the token at a place, by those before it."""
    chance = zlib.crc32(np.array(ids[:place], dtype=np.int32).tobytes())
    return PromptLogprob(ids[place], -float(chance % 1000), 1 + chance % NUM_TOKENS)


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


@dataclass(slots=True)
class Table:
    """What a stage knows of an open sequence."""

    record: Open
    ids: list[int]
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_true: int = 0
    """Of these tokens, those that are no drafts or came true."""


class Stages:
    """All stages of one epoch as one."""

    def __init__(self, num_blocks: int, num_slots: int = 0, max_adapters: int = 1) -> None:
        self.cells = np.full((num_blocks, BLOCK_TOKENS), -1, dtype=np.int32)
        self.slots = np.full((num_slots, BLOCK_TOKENS), -1, dtype=np.int32)
        self.num_moved = {True: 0, False: 0}
        """Blocks, out and back."""
        self.tables: dict[int, Table] = {}
        self.max_adapters = max_adapters
        self.num_steps = 0
        self.num_opened = 0

    def run(self, plan: StepPlan, bad: tuple[int, ...] = ()) -> StepResult:
        """One step: moves, opens, rows, closes."""
        plan = decode_plan(encode(plan))
        assert plan.step == self.num_steps, "step numbers are contiguous"
        self.num_steps += 1
        held = {
            block
            for seq, table in self.tables.items()
            if seq not in plan.closes
            for block in table.blocks
        }
        assert (
            max(Counter((move.block, move.is_out) for move in plan.moves).values(), default=0) <= 1
        )
        for move in plan.moves:
            assert move.block not in held, "nobody holds what is moved"
            self._move(move)
        for record in plan.opens:
            self._open(record)
        adapters = {table.record.adapter for table in self.tables.values()} - {""}
        assert len(adapters) <= self.max_adapters, "stages hold no more adapters"
        assert len({row.seq for row in plan.rows}) == len(plan.rows), (
            "one row per sequence and step"
        )
        tokens = [run for row in plan.rows if (run := self._compute(row))]
        scored = [found for row in plan.rows if (found := self._score(row))]
        assert sum(len(each.logprobs) for each in scored) <= MAX_SCORED + len(scored)
        for seq in plan.closes:
            del self.tables[seq]
        result = StepResult(
            step=plan.step,
            tokens=tuple(tokens),
            logprobs=tuple(tuple(TokenLogprob(token, -1.0) for token in run) for run in tokens),
            bad=tuple(row.seq for row in plan.rows if row.wants and row.seq in bad),
            scored=tuple(scored),
        )
        return decode_result(encode(result))

    def _move(self, move: Move) -> None:
        source, target = (self.cells, self.slots) if move.is_out else (self.slots, self.cells)
        places = (move.block, move.slot) if move.is_out else (move.slot, move.block)
        assert (source[places[0]] >= 0).all(), "full blocks are moved"
        target[places[1]] = source[places[0]]
        self.num_moved[move.is_out] += 1

    def _open(self, record: Open) -> None:
        assert record.seq >= self.num_opened, "a sequence number is used once"
        self.num_opened = record.seq + 1
        assert record.num_cached % BLOCK_TOKENS == 0, "whole blocks are shared"
        assert record.num_cached < len(record.ids), "a token is left to compute"
        table = Table(
            record, list(record.ids), num_computed=record.num_cached, num_true=record.num_cached
        )
        self.tables[record.seq] = table

    def _compute(self, row: Row) -> tuple[int, ...]:
        table = self.tables[row.seq]
        if table.num_true < table.num_computed:
            del table.ids[table.num_true :]
        table.ids.extend(row.ids + row.drafts)
        table.blocks.extend(row.blocks)
        end = row.start + row.length
        assert row.length >= 1
        assert row.start == table.num_true, "rows of a sequence are contiguous"
        assert not row.drafts or (row.wants and row.length == 1 + len(row.drafts)), (
            "decodes have drafts"
        )
        assert blocks_for(end) <= len(table.blocks) <= table.record.num_blocks, (
            "a block for every place, within bounds"
        )
        assert row.wants == (end == len(table.ids)), "a token is wanted from the last known place"
        if row.start == table.record.num_cached:
            cached = self.cells[table.blocks].ravel()[: row.start]
            assert list(cached) == table.ids[: row.start], (
                "shared blocks hold the sequence's own tokens"
            )
        for place in range(row.start, end):
            self.cells[table.blocks[place // BLOCK_TOKENS], place % BLOCK_TOKENS] = table.ids[place]
        table.num_computed = table.num_true = end
        return self._sample(row, table) if row.wants else ()

    def _score(self, row: Row) -> ScoredTokens | None:
        """What is told of the prompt's tokens that follow a row."""
        record = self.tables[row.seq].record
        start = max(row.start, record.num_scored)
        end = min(row.start + row.length, record.num_prompt - 1)
        if record.params.prompt_logprobs is None or start >= end:
            return None
        cells = self.cells[self.tables[row.seq].blocks].ravel().tolist()
        ids = [*cells[:end], record.ids[end]]
        told = tuple(prompt_score(ids, place) for place in range(start + 1, end + 1))
        return ScoredTokens(row.seq, start, told)

    def _sample(self, row: Row, table: Table) -> tuple[int, ...]:
        """Tokens up to the first that is not the next draft."""
        cells = self.cells[table.blocks].ravel().tolist()
        tokens = list[int]()
        for num_known, draft in enumerate(
            (*row.drafts, None), table.num_computed - len(row.drafts)
        ):
            table.num_true = num_known
            tokens.append(next_token(cells[:num_known], table.record.seed))
            if tokens[-1] != draft:
                break
        return tuple(tokens)


class Pipeline:
    """A scheduler with its stages, and what it told about each job. Steps are answered when
    `deliver` is called."""

    def __init__(self, settings: SchedulerConfig) -> None:
        self.scheduler = Scheduler(settings)
        self.stages = Stages(settings.num_blocks, settings.offload.num_slots, settings.max_adapters)
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
        config = self.scheduler.config
        self.stages = Stages(num_blocks, config.offload.num_slots, config.max_adapters)

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


def decoding(pipeline: Pipeline, *names: str, num_prompt: int = 5, max_tokens: int = 400) -> None:
    """Adds jobs and computes their prompts: each has one output token and nothing is in flight."""
    for name in names:
        pipeline.add(request(name, num_prompt=num_prompt, max_tokens=max_tokens))
    while any(len(pipeline.outputs[name, 1]) == 0 for name in names):
        pipeline.schedule()
        pipeline.deliver()
