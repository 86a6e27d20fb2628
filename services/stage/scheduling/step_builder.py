"""A step while it is cut: its rows and what is left of its token budget. Decides nothing: that is the scheduler's."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.stage.scheduling.sequence import Sequence
from services.stage.scheduling.step_plan import Open, Row


@dataclass(slots=True)
class StepBuilder:
    """A step while it is cut. `sequences` are those of `rows`, in the same order."""

    budget: int
    opens: list[Open] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)

    def add(self, sequence: Sequence, length: int, ids: tuple[int, ...] = ()) -> None:
        """The next `length` tokens of a sequence, with the blocks that the stages do not know yet."""
        start, blocks = sequence.num_computed, tuple(sequence.blocks[sequence.num_sent :])
        sequence.num_sent = len(sequence.blocks)
        end = start + length
        self.rows.append(Row(sequence.number, start, length, ids, blocks, end == len(sequence.ids)))
        self.sequences.append(sequence)
        self.budget -= length
        sequence.num_computed = end
        sequence.num_in_flight += 1
