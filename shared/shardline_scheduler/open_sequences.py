"""The sequences that are open on a stage: known ids and block tables, kept up by StepPlans. Trusts
no plan.

Knows no torch: a plan that does not fit what came before it is refused before anything is computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from shardline.base.errors import ProtocolError
from shardline_scheduler.kv_blocks import BLOCK_TOKENS, blocks_for
from shardline_scheduler.step_plan import Open, Row, StepPlan


class OpenSequence:
    """One open sequence: what the stage knows of it."""

    __slots__ = (
        *("blocks", "dimensions", "ids", "max_blocks", "num_computed", "num_drafts", "seed"),
    )

    def __init__(self, opened: Open) -> None:
        self.ids = list(opened.ids)
        self.blocks: list[int] = []
        self.max_blocks = opened.num_blocks
        self.seed = opened.seed
        self.dimensions = opened.params.dimensions
        """Numbers that its vector is cut to; None: it is whole."""
        self.num_computed = opened.num_cached
        self.num_drafts = 0
        """The last of the known ids, which may not come true."""

    def settle(self, start: int) -> None:
        """The next row begins at `start`: of the drafts in the row before, only those up to there
        came true."""
        if self.num_drafts and self.num_computed - self.num_drafts <= start <= self.num_computed:
            del self.ids[start:]
            self.num_computed = start
            self.num_drafts = 0


class OpenSequences:
    """Open sequences by number, within the stage's limits."""

    def __init__(self, *, num_blocks: int, max_open: int, vocab_size: int) -> None:
        self._num_blocks = num_blocks
        self._max_open = max_open
        self._vocab_size = vocab_size
        self._known: dict[int, OpenSequence] = {}
        self._num_holders: Counter[int] = Counter()

    @property
    def blocks_used(self) -> int:
        """KV blocks in the tables of open sequences, each counted once."""
        return len(self._num_holders)

    def __len__(self) -> int:
        return len(self._known)

    def open(self, opened: Open) -> None:
        """A sequence appears. Raises ProtocolError."""
        if opened.seq in self._known:
            raise ProtocolError(f"sequence {opened.seq} is opened twice")
        if len(self._known) >= self._max_open:
            raise ProtocolError(
                f"sequence {opened.seq} would be open beyond the limit of {self._max_open}"
            )
        if opened.num_cached % BLOCK_TOKENS or not 0 <= opened.num_cached < max(1, len(opened.ids)):
            raise ProtocolError(
                f"sequence {opened.seq} opens with {opened.num_cached} of {len(opened.ids)} tokens"
            )
        self._check_ids(opened.seq, opened.ids)
        self._known[opened.seq] = OpenSequence(opened)

    def close(self, seq: int) -> None:
        """A sequence is over. Raises ProtocolError."""
        known = self._known.pop(seq, None)
        if known is None:
            raise ProtocolError(f"sequence {seq} is closed, but was not open")
        for block in known.blocks:
            self._num_holders[block] -= 1
            if not self._num_holders[block]:
                del self._num_holders[block]

    def clear(self) -> None:
        """Forget all of them."""
        self._known.clear()
        self._num_holders.clear()

    def ids_of(self, seq: int) -> list[int]:
        """The known ids of an open sequence."""
        return self._known[seq].ids

    def dimensions_of(self, seq: int) -> int | None:
        """Numbers that an open sequence's vector is cut to; None: it is whole."""
        return self._known[seq].dimensions

    def extend(self, plan: StepPlan) -> Iterator[tuple[Row, OpenSequence]]:
        """Each row of the plan with its sequence, extended by the row's ids and blocks. Raises
        ProtocolError."""
        for row in plan.rows:
            known = self._known.get(row.seq)
            if known is None:
                raise ProtocolError(f"row of sequence {row.seq}, which is not open")
            known.settle(row.start)
            if row.ids or row.drafts:
                self._add_ids(row, known)
            if row.blocks:
                self._add_blocks(row, known)
            self._check_span(row, known)
            known.num_computed = row.start + row.length
            yield row, known

    def _check_ids(self, seq: int, ids: tuple[int, ...]) -> None:
        if ids and not 0 <= min(ids) <= max(ids) < self._vocab_size:
            raise ProtocolError(f"sequence {seq} has a token id outside 0-{self._vocab_size - 1}")

    def _add_ids(self, row: Row, known: OpenSequence) -> None:
        self._check_ids(row.seq, row.ids + row.drafts)
        if row.drafts and (len(row.ids), row.length, row.wants) != (1, 1 + len(row.drafts), True):
            raise ProtocolError(
                f"sequence {row.seq} has drafts in a row of {row.length} that is no decode"
            )
        known.ids.extend(row.ids + row.drafts)
        known.num_drafts = len(row.drafts)

    def _add_blocks(self, row: Row, known: OpenSequence) -> None:
        if not 0 <= min(row.blocks) <= max(row.blocks) < self._num_blocks:
            raise ProtocolError(
                f"sequence {row.seq} has a KV block outside 0-{self._num_blocks - 1}"
            )
        if len(known.blocks) + len(row.blocks) > known.max_blocks:
            raise ProtocolError(
                f"sequence {row.seq} takes more than its {known.max_blocks} KV blocks"
            )
        known.blocks.extend(row.blocks)
        self._num_holders.update(row.blocks)

    @staticmethod
    def _check_span(row: Row, known: OpenSequence) -> None:
        end = row.start + row.length
        if row.length < 1 or row.start != known.num_computed:
            raise ProtocolError(
                f"sequence {row.seq} continues at {row.start} for {row.length}, "
                f"but {known.num_computed} are computed"
            )
        if end > len(known.ids):
            raise ProtocolError(
                f"sequence {row.seq} runs to {end}, but only {len(known.ids)} ids are known"
            )
        if row.drafts and end < len(known.ids):
            raise ProtocolError(
                f"sequence {row.seq} has drafts, but runs to {end} of {len(known.ids)} ids"
            )
        if end > len(known.blocks) * BLOCK_TOKENS:
            raise ProtocolError(
                f"sequence {row.seq} runs to {end}: {blocks_for(end)} KV blocks, "
                f"not {len(known.blocks)}"
            )
