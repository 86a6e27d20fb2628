"""The stages of a pipeline without a model: they obey StepPlans to the letter and assert that these
make sense.

Their cells hold token ids where KV would be, and the next token is a hash of the cells that a
sequence's block table reaches: a wrong table, a block used twice or a lost token changes the
output.
"""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from shardline.contract.job import PromptLogprob, TokenLogprob
from shardline_scheduler.kv_blocks import BLOCK_TOKENS, blocks_for
from shardline_scheduler.step_cutter import MAX_SCORED
from shardline_scheduler.step_plan import (
    Move,
    Open,
    Row,
    ScoredTokens,
    Snapshot,
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


def next_token(ids: list[int], seed: int) -> int:
    """The model. With `REPEATS` in its seed, three of four tokens are those of a round."""
    chance = zlib.crc32(np.array(ids, dtype=np.int32).tobytes(), seed % REPEATS)
    if seed >= REPEATS and chance % 4:
        return 1 + (seed + len(ids) % ROUND) % (NUM_TOKENS - 1)
    return chance % NUM_TOKENS


def prompt_score(ids: list[int], place: int) -> PromptLogprob:
    """What is told of the token at a place, by those before it."""
    chance = zlib.crc32(np.array(ids[:place], dtype=np.int32).tobytes())
    return PromptLogprob(ids[place], -float(chance % 1000), 1 + chance % NUM_TOKENS)


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

    def __init__(
        self, num_blocks: int, num_slots: int = 0, max_adapters: int = 1, num_states: int = 0
    ) -> None:
        self.states: list[list[int]] = [[EOS]] * num_states
        """What recurrent layers keep in each slot: all tokens that they have gone through."""
        self.num_snapshots = 0
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
        for snapshot in plan.snapshots:
            self._keep(snapshot)
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
        if self.states:
            self._open_state(record)
        self.tables[record.seq] = table

    def _open_state(self, record: Open) -> None:
        self._check_slot(record.state)
        assert (record.snapshot >= 0) == (record.num_cached > 0), "a snapshot for cached tokens"
        if record.num_cached:
            self._check_slot(record.snapshot)
        known = self.states[record.snapshot] if record.num_cached else []
        assert known == list(record.ids[: record.num_cached]), "the state is that of its own tokens"
        self.states[record.state] = known

    def _keep(self, snapshot: Snapshot) -> None:
        self._check_slot(snapshot.slot)
        self.states[snapshot.slot] = self.states[self.tables[snapshot.seq].record.state]
        self.num_snapshots += 1

    def _check_slot(self, slot: int) -> None:
        assert 0 <= slot < len(self.states)
        held = {table.record.state for table in self.tables.values()}
        assert slot not in held, "no two sequences have one slot"

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
        if self.states:
            assert self.states[table.record.state] == table.ids[: row.start], "no token is left out"
            self.states[table.record.state] = table.ids[:end]
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
