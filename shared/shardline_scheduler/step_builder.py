"""A step while it is cut: its rows and what is left of its token budget. Decides nothing: that is
the scheduler's."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from shardline.contract.job import SamplingParams
from shardline_scheduler.sequence import Sequence
from shardline_scheduler.step_plan import Move, Open, Row, Snapshot, StepPlan


@dataclass(slots=True)
class StepBuilder:
    """A step while it is cut. `sequences` are those of `rows`, in the same order."""

    budget: int
    pools: bool = False
    opens: list[Open] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)

    def open(self, sequence: Sequence) -> None:
        """Its first appearance, with all that is known of it."""
        request = sequence.request
        is_whole = sequence.end is not None
        self.opens.append(
            Open(
                seq=sequence.number,
                ids=tuple(sequence.ids),
                num_prompt=len(request.prompt_ids),
                params=_of_scores(request.params) if is_whole else request.params,
                seed=request.seed,
                num_blocks=sequence.most_blocks,
                num_cached=sequence.num_computed,
                adapter=request.adapter,
                trace=request.trace,
                banned=() if is_whole else request.banned,
                labels=request.labels,
                num_scored=len(sequence.scores),
                state=sequence.state_slot,
                snapshot=sequence.state_from,
            )
        )

    def add(
        self,
        sequence: Sequence,
        length: int,
        ids: tuple[int, ...] = (),
        drafts: tuple[int, ...] = (),
    ) -> None:
        """The next `length` tokens of a sequence and drafts, with the blocks that the stages do not
        know yet.

        Drafts do not count as computed before one has come true.
        """
        start = sequence.num_computed
        blocks = tuple(sequence.blocks[sequence.num_sent :])
        sequence.num_sent = len(sequence.blocks)
        end = start + length
        wants = end == len(sequence.ids) and not self.pools
        num_rows = length + len(drafts)
        self.rows.append(Row(sequence.number, start, num_rows, ids, blocks, wants, drafts))
        self.sequences.append(sequence)
        self.budget -= num_rows
        sequence.num_computed = end
        sequence.num_in_flight += 1

    def plan(
        self,
        step: int,
        closes: Items[int],
        moves: tuple[Move, ...],
        snapshots: tuple[Snapshot, ...],
    ) -> StepPlan:
        """The message for every stage."""
        return StepPlan(
            step,
            tuple(self.opens),
            tuple(self.rows),
            tuple(closes),
            moves=moves,
            snapshots=snapshots,
        )


def _of_scores(params: SamplingParams) -> SamplingParams:
    """What a prompt is scored by: after a whole completion its grammar and limits may leave no
    token."""
    return SamplingParams(
        temperature=0.0, prompt_logprobs=params.prompt_logprobs, adapter=params.adapter
    )
