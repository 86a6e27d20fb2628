"""A model that costs nothing and forgives nothing: its KV holds what steps wrote, each token hangs
on all of it.

Each layer keeps the values that came to a place and gives a hash of all places up to it. A frame
that was lost, a block used twice or a stale cell changes every later token. Values are integers
below 2^24, so that float32 carries them.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from services.stage.adapters.peft import AdapterFolder
from shardline.contract.job import SamplingParams
from shardline_scheduler.kv_blocks import BLOCK_TOKENS
from shardline_scheduler.offload import NO_OFFLOAD, OffloadTerms
from shardline_scheduler.open_sequences import OpenSequence, OpenSequences
from shardline_scheduler.step_plan import Move, Row, StepPlan, StepResult
from tests.simulation.loom import Loom, elapse

NUM_LAYERS = 3
NUM_TOKENS = 64
"""Tokens that the model says."""

EOS = 2
ROUND = 5
POISON = NUM_TOKENS
"""A prompt that holds it kills the stage that computes it."""

VOCAB_SIZE = NUM_TOKENS + 1
MAX_LEN = 192
_MASK = (1 << 24) - 1


@dataclass(frozen=True, slots=True)
class Told:
    """What the tail keeps of an open sequence to sample."""

    params: SamplingParams
    seed: int
    num_prompt: int


class Layer:
    """One layer's KV."""

    def __init__(self, number: int, num_blocks: int, salt: int, num_slots: int = 0) -> None:
        self._cells = array("I", bytes(4 * num_blocks * BLOCK_TOKENS))
        self._slots = array("I", bytes(4 * num_slots * BLOCK_TOKENS))
        self._start = zlib.crc32(b"layer", number * 1_000_003 + salt)

    def run(self, blocks: Sequence[int], start: int, values: Sequence[int]) -> list[int]:
        """Writes the values at places from `start` on; what comes out for each."""
        for place, value in enumerate(values, start):
            self._cells[blocks[place // BLOCK_TOKENS] * BLOCK_TOKENS + place % BLOCK_TOKENS] = value
        sums = zlib.crc32(b"".join(self._spans(blocks, 0, start)), self._start)
        out = []
        for place in range(start, start + len(values)):
            sums = zlib.crc32(b"".join(self._spans(blocks, place, place + 1)), sums)
            out.append(sums & _MASK)
        return out

    def move(self, move: Move) -> None:
        """Copies a block to a slot, or back."""
        block, slot = (
            slice(first * BLOCK_TOKENS, (first + 1) * BLOCK_TOKENS)
            for first in (move.block, move.slot)
        )
        if move.is_out:
            self._slots[slot] = self._cells[block]
        else:
            self._cells[block] = self._slots[slot]

    def _spans(self, blocks: Sequence[int], start: int, end: int) -> Iterator[bytes]:
        while start < end:
            stop = min(end, (start // BLOCK_TOKENS + 1) * BLOCK_TOKENS)
            first = blocks[start // BLOCK_TOKENS] * BLOCK_TOKENS + start % BLOCK_TOKENS
            yield self._cells[first : first + stop - start].tobytes()
            start = stop


def sample(hidden: int, seed: int, index: int) -> int:
    """The next token. Jobs with an odd seed mostly say a few tokens in turn, which can be
    guessed."""
    chance = zlib.crc32(b"%d %d %d" % (hidden, seed, index))
    if seed % 2 and chance & 3:
        return EOS + 1 + (seed + index % ROUND) % (NUM_TOKENS - EOS - 1)
    return (chance >> 2) % NUM_TOKENS


def undisturbed(prompt_ids: Sequence[int], seed: int, max_tokens: int) -> tuple[int, ...]:
    """What one process gives that nothing happens to."""
    layers = [Layer(number, 3, 0) for number in range(NUM_LAYERS)]
    blocks = range(3)
    outputs = list[int]()
    values = list(prompt_ids)
    start = 0
    while len(outputs) < max_tokens:
        states = values
        for layer in layers:
            states = layer.run(blocks, start, states)
        start += len(values)
        outputs.append(sample(states[-1], seed, len(outputs)))
        if outputs[-1] == EOS:
            break
        values = [outputs[-1]]
    return tuple(outputs)


@dataclass(slots=True, eq=False)
class Toy:
    """`services.stage.engine.executor.Executor` without torch's mathematics. With the real
    roster."""

    loom: Loom
    layers: range
    num_blocks: int
    token_budget: int
    max_open: int
    exact: bool
    step_s: float
    salt: int
    on_step: Callable[[StepPlan], None]
    """Before it is computed."""
    on_poison: Callable[[], None] | None
    """In the stage that poison kills."""
    dtype: torch.dtype = torch.float32
    attention_kind: str = "toy"
    offload: OffloadTerms = NO_OFFLOAD
    max_adapters: int = 1
    num_states: int = 0
    states_used: int = 0
    hang_s: float = 0.0
    """The next step takes so much longer."""
    _layers: list[Layer] = field(init=False)
    _roster: OpenSequences = field(init=False)
    _told: dict[int, Told] = field(default_factory=dict)

    def __post_init__(self) -> None:
        salt = 0 if self.exact else self.salt
        num_slots = self.offload.num_slots
        self._layers = [Layer(number, self.num_blocks, salt, num_slots) for number in self.layers]
        self._roster = OpenSequences(
            num_blocks=self.num_blocks, max_open=self.max_open, vocab_size=VOCAB_SIZE
        )

    @property
    def fingerprint(self) -> str:
        """Of exactness: heads that compute otherwise have another one."""
        return "exact" if self.exact else "other"

    @property
    def is_first(self) -> bool:
        """It looks tokens up."""
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        """It samples."""
        return self.layers.stop == NUM_LAYERS

    @property
    def num_open(self) -> int:
        """Sequences in KV."""
        return len(self._roster)

    @property
    def blocks_used(self) -> int:
        """KV in use."""
        return self._roster.blocks_used

    def enter_thread(self) -> None:
        """It computes on cores."""

    def staging(self, num_buffers: int) -> None:
        """It computes on cores."""

    def reset(self) -> None:
        """A new epoch. The cells keep their rubbish, as memory does."""
        self._roster.clear()
        self._told.clear()

    @property
    def adapters(self) -> AdapterFolder:
        """It has none."""
        return AdapterFolder(None, {}, Path())

    def admit(self, plan: StepPlan) -> StepPlan:
        """Nobody asks for an adapter."""
        return plan

    def run(self, plan: StepPlan, hidden: Tensor | None) -> Tensor | StepResult:
        """One step."""
        self.on_step(plan)
        hang_s = self.hang_s
        self.hang_s = 0.0
        elapse(self.loom.rng.uniform(0.5, 1.5) * self.step_s + 0.0002 * plan.num_tokens + hang_s)
        for layer, move in product(self._layers, plan.moves):
            layer.move(move)
        for opened in plan.opens:
            self._roster.open(opened)
            self._told[opened.seq] = Told(opened.params, opened.seed, opened.num_prompt)
        given = (
            None
            if self.is_first or hidden is None
            else [int(value) for value in hidden.flatten().tolist()]
        )
        values: list[int] = []
        tokens: list[tuple[int, ...]] = []
        for row, known in self._roster.extend(plan):
            states = self._row(row, known, given, len(values))
            values += states
            if row.wants:
                tokens.append(self._sample(row, states))
        for seq in plan.closes:
            self._roster.close(seq)
            del self._told[seq]
        if self.is_last:
            return StepResult(plan.step, tuple(tokens))
        return torch.tensor(values, dtype=torch.float32).reshape(len(values), 1)

    def _sample(self, row: Row, states: list[int]) -> tuple[int, ...]:
        told = self._told[row.seq]
        tokens = list[int]()
        first = row.start + row.length - len(row.drafts) - told.num_prompt
        for index, (state, draft) in enumerate(
            zip(states[-1 - len(row.drafts) :], (*row.drafts, None), strict=True), first
        ):
            tokens.append(sample(state, told.seed, index))
            if tokens[-1] != draft:
                break
        return tuple(tokens)

    def _row(self, row: Row, known: OpenSequence, given: list[int] | None, first: int) -> list[int]:
        ids = known.ids[row.start : row.start + row.length]
        if self.on_poison is not None and POISON in ids:
            self.on_poison()
        states = ids if given is None else given[first : first + row.length]
        for layer in self._layers:
            states = layer.run(known.blocks, row.start, states)
        return states
