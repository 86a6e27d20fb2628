"""Cuts a step: a share of the decodes first, then chunks of prompts, until the token budget is
used.

Knows no result: what becomes of the tokens is the scheduler's.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import isqrt
from operator import attrgetter

from shardline.base.rounding import ceil_div
from shardline_scheduler.batch import Batch
from shardline_scheduler.kv_blocks import BLOCK_TOKENS
from shardline_scheduler.parking import MAX_LOOK_AHEAD
from shardline_scheduler.scheduler_config import SchedulerConfig
from shardline_scheduler.sequence import Sequence, State, WaitingQueue
from shardline_scheduler.step_builder import StepBuilder

MIN_CHUNK = 64
"""Tokens of a prefill that make a step's trip worth it, where the budget has them."""

MIN_PIECE = 32
"""Tokens of a prompt in a separate step, at least: half as many save a tenth of a prefill of 128
at most, and cost more on devices that are slow with few rows."""

MAX_SCORED = 256
"""Rows of a step's prompts with log-probabilities: each has separate logits. A sequence that
finds none left has one."""


class StepCutter:
    """Chooses the rows of the next step, and admits waiting sequences where there is room for
    them."""

    def __init__(self, waiting: WaitingQueue, batch: Batch, numbers: Iterator[int]) -> None:
        self._waiting = waiting
        self._batch = batch
        self._numbers = numbers
        self._was_narrow = False

    def cut(self, config: SchedulerConfig) -> StepBuilder:
        """Returns the rows of the next step; there may be none. The number of lanes may change from
        step to step.

        A step with an interactive prompt is narrow: it has no rows of others, which would
        delay the first token. No two steps in a row are narrow, so that prompts without
        end stop no batch.
        """
        builder = StepBuilder(config.token_budget, pools=config.pools)
        if config.pools:
            self._add_whole(builder)
            return builder
        is_narrow = not self._was_narrow and self._has_interactive_prompt()
        self._add_decodes(builder, config, is_narrow)
        self._add_chunks(builder, config, is_narrow)
        self._was_narrow = is_narrow
        return builder

    def foremost(self) -> list[Sequence]:
        """The first in line that nothing but room holds up, or a place for an adapter."""
        with_quarantined = self._batch.in_quarantine is None
        return self._waiting.first(MAX_LOOK_AHEAD, with_quarantined=with_quarantined)

    def _add_whole(self, builder: StepBuilder) -> None:
        """Adds sequences in order, each as a whole, up to the first that does not fit: it is the
        next step's first."""
        for sequence in self._in_line(builder):
            if sequence.num_missing > builder.budget:
                break
            builder.add(sequence, sequence.num_missing)
            del self._batch.prefilling[sequence.number]

    def _has_interactive_prompt(self) -> bool:
        """Whether there are ids to compute of a sequence for which somebody waits."""
        begun = self._batch.prefilling.values()
        return (
            any(each.is_interactive for each in begun)
            or self._admissible(is_narrow=True) is not None
        )

    def _add_decodes(self, builder: StepBuilder, config: SchedulerConfig, is_narrow: bool) -> None:
        """Adds the share of one lane: with all of them in one step, the other stages would have
        nothing to do."""
        batch = self._batch
        share = ceil_div(batch.num_decoding, config.num_lanes)
        ready = (each for each in batch.ready.values() if each.is_interactive or not is_narrow)
        decodes = list(islice(ready, min(share, builder.budget)))
        lookup = 0 if config.is_recurrent else config.prompt_lookup
        room = min(lookup, builder.budget // 2) - len(decodes)
        for index, sequence in enumerate(decodes):
            if sequence.state is not State.RUNNING:
                continue  # It was preempted for one before it.
            has_block = sequence.num_computed < len(sequence.blocks) * BLOCK_TOKENS
            if has_block or batch.grow(sequence):
                del batch.ready[sequence.number]
                drafts = sequence.draft(room // (len(decodes) - index))
                num_drafts = batch.kv.widen(sequence, len(drafts), len(batch.running))
                room -= num_drafts
                builder.add(sequence, 1, (sequence.ids[-1],), drafts[:num_drafts])

    def _add_chunks(self, builder: StepBuilder, config: SchedulerConfig, is_narrow: bool) -> None:
        """Adds chunks in order. Each may take half of what is left, so that a long prompt holds up
        neither those behind it nor admission; what no other needs goes to the first."""
        left = min(builder.budget, self._max_prompt_rows(config))
        left_scored = MAX_SCORED
        lengths: dict[Sequence, int] = {}
        for sequence in self._in_line(builder, is_narrow) if left else ():
            length = min(max(MIN_CHUNK, left // 2), left, sequence.num_missing)
            if sequence.num_unscored:
                length = min(length, max(left_scored, 1))
                left_scored -= length
            length = sequence.up_to_stop(length)
            lengths[sequence] = length
            left -= length
            if left == 0:
                break
        for sequence, length in lengths.items():
            more = min(left, sequence.num_missing - length)
            if sequence.num_unscored:
                more = min(more, max(left_scored, 0))
                left_scored -= more
            # One behind it in line may have added a stop.
            taken = sequence.up_to_stop(length + more)
            left -= taken - length
            builder.add(sequence, taken)
            if sequence.num_missing == 0:
                del self._batch.prefilling[sequence.number]

    def _max_prompt_rows(self, config: SchedulerConfig) -> int:
        """Returns how many rows of prompts the step may have. Where too little waits to keep all
        stages busy, prompts are cut into pieces, which they compute at the same time.

        Over S stages, n pieces of T tokens take (n + S - 1) * (T / n + f), where f is the fixed
        cost of a step in tokens: least with n = sqrt(T * (S - 1) / f).
        """
        num_others = min(config.num_lanes, config.num_stages or config.num_lanes) - 1
        fixed = self._batch.step_cost.fixed_tokens
        if not num_others or self._batch.num_decoding > num_others or fixed is None:
            return config.token_budget
        waiting = self.foremost()
        line = [*self._batch.prefilling.values(), *waiting]
        first = min(line, key=attrgetter("order"), default=None)
        num_missing = sum(each.num_missing for each in line)
        if (
            first is None
            or len(waiting) == MAX_LOOK_AHEAD
            or num_missing >= config.token_budget + first.num_missing
        ):
            return config.token_budget
        # All of a prompt that has begun, so that its pieces have one length.
        length = max(num_missing, len(first.ids) - (first.num_cached or 0))
        best = isqrt(int(length * num_others / max(fixed, 1.0)))
        return ceil_div(length, max(1, min(best, length // MIN_PIECE)))

    def _in_line(self, builder: StepBuilder, is_narrow: bool = False) -> Iterator[Sequence]:
        """Who has ids to compute, in order: those that have begun, and between them those that find
        a place now."""
        for sequence in sorted(self._batch.prefilling.values(), key=attrgetter("order")):
            if is_narrow and not sequence.is_interactive:
                break
            while (newcomer := self._admissible()) is not None and newcomer.order < sequence.order:
                yield self._start(newcomer, builder)
            yield sequence
        while (newcomer := self._admissible(is_narrow)) is not None:
            yield self._start(newcomer, builder)

    def _admissible(self, is_narrow: bool = False) -> Sequence | None:
        """Returns who is admitted next. Others may overtake one that finds no room or waits for a
        prefix, but not for ever. To a narrow step only who is interactive is."""
        if self._batch.is_full:
            return None
        for sequence in self.foremost():
            if is_narrow and not sequence.is_interactive:
                return None
            if self._batch.may_start(sequence):
                return sequence
            if sequence.patience <= 0:
                return None
        return None

    def _start(self, sequence: Sequence, builder: StepBuilder) -> Sequence:
        for overtaken in self.foremost():
            # One without an adapter takes no place from who waits for its adapter's.
            delays = sequence.request.adapter or self._batch.has_place(overtaken)
            if overtaken.order < sequence.order and delays:
                overtaken.patience -= 1
        self._batch.start(sequence, next(self._numbers))
        builder.open(sequence)
        return sequence
