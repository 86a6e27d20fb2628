"""KV of sequences and of prefixes: what one sequence has computed, others with the same first
tokens need not compute.

A block is found by a digest of all tokens up to its end, of their tenant and of the adapter that
computed them, name and fingerprint: a stage may refuse one name and not another one of the same
files. Stages hear of it in the plan: a sequence opens with blocks that have filled places. A
preempted one may find its blocks in slots of the offload too. Where layers are recurrent, a
beginning is found only if there is a snapshot of the state behind it. Knows no torch and no step.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from hashlib import blake2b

from shardline_scheduler.kv_blocks import BLOCK_TOKENS, BlockPool, blocks_for
from shardline_scheduler.offload import Offload
from shardline_scheduler.parking import spare_blocks
from shardline_scheduler.sequence import Sequence, State
from shardline_scheduler.state_pool import StatePool
from shardline_scheduler.step_plan import Snapshot

MIN_BLOCKS = 4
"""Of a prompt that is worth one more step, which ends at its last full block: shorter ones get a
snapshot once another begins as they do."""

DIGEST_BYTES = 16
"""Two prefixes with one digest would take 2^64 tries to find."""


class PrefixCache:
    """Gives sequences their blocks. While `is_on`, full blocks are found again, also after their
    sequence has ended."""

    def __init__(
        self, num_blocks: int, *, is_on: bool, num_slots: int = 0, num_states: int = 0
    ) -> None:
        """`num_slots` are those of the offload; without `num_states` no layer is recurrent."""
        self.offload = Offload(num_slots)
        self.states = StatePool(num_states)
        self.pool = BlockPool(num_blocks, self.offload.evict)
        self._is_on = is_on

    def has_room(self, sequence: Sequence, num_running: int) -> bool:
        """Whether there are blocks for all that is known of a sequence. Those that another one
        holds cost nothing."""
        needed = blocks_for(len(sequence.ids))
        room = self.pool.num_free - spare_blocks(num_running)
        # The last block is its own: a full pool is seen without a look at the prompt.
        if needed <= room or room < 1:
            return needed <= room
        return (
            needed
            - sum(block is not None and self.pool.is_held(block) for block in self._find(sequence))
            <= room
        )

    def awaits(self, sequence: Sequence, prefilling: Iterable[Sequence]) -> bool:
        """Whether a running sequence that is before it in order is yet to compute a block that it
        would find: soon it need not compute that block too.

        The other one has all its blocks and comes first in each step, so the wait ends. Where
        layers are recurrent, it stops for a snapshot on its way.
        """
        will_help = self._will_stop if self.states.num_slots else self._will_fill
        return self._is_on and any(
            will_help(other, sequence) for other in prefilling if other.order < sequence.order
        )

    def open(self, sequence: Sequence) -> None:
        """Blocks for all that is known of it; what is in them already counts as computed."""
        known = self._find_blocks(sequence)
        found = known[: self._num_resumable(sequence, len(known))]
        shared = [block for block in found if block is not None]
        self.pool.share(shared)
        new = iter(self.pool.allocate(blocks_for(len(sequence.ids)) - len(shared)))
        sequence.blocks = [
            self._restore(sequence, at, next(new)) if b is None else b for at, b in enumerate(found)
        ]
        sequence.blocks += new
        self.offload.drop(sequence)
        sequence.num_computed = len(found) * BLOCK_TOKENS
        sequence.num_named = len(found)
        if sequence.num_cached is None:
            sequence.num_cached = min(sequence.num_computed, len(sequence.request.prompt_ids))
        if self.states.num_slots:
            self._open_state(sequence, len(known))

    def widen(self, sequence: Sequence, num: int, num_running: int) -> int:
        """Places for `num` drafts behind its known tokens; how many there are. They get a new block
        only if no admission would take it."""
        room = len(sequence.blocks) * BLOCK_TOKENS - len(sequence.ids)
        if num > room and self.pool.can_allocate(1 + spare_blocks(num_running)):
            sequence.blocks.extend(self.pool.allocate(1))
            return num
        return min(num, room)

    def keep(self, sequences: Iterable[Sequence]) -> None:
        """Their full blocks can be found from the next step on: steps run in order, so they are
        filled by then."""
        for sequence in sequences if self._is_on else ():
            while (sequence.num_named + 1) * BLOCK_TOKENS <= sequence.num_computed:
                self.pool.name(
                    sequence.blocks[sequence.num_named], _digest(sequence, sequence.num_named)
                )
                sequence.num_named += 1

    def take_snapshots(self, sequences: Iterable[Sequence]) -> tuple[Snapshot, ...]:
        """Returns what stages copy once the step that is cut is computed: states of sequences that
        have come to a stop, or to the end of their known tokens, with full blocks behind them."""
        snapshots: list[Snapshot] = []
        for sequence in sequences if self._is_on and self.states.num_slots else ():
            end = sequence.num_computed
            is_stop = end in sequence.stops
            if end % BLOCK_TOKENS or sequence.state is not State.RUNNING:
                continue
            if not is_stop and end < len(sequence.ids):
                continue
            name = _digest(sequence, end // BLOCK_TOKENS - 1)
            slot = self.states.keep(name, None if is_stop else sequence.tail)
            if slot is not None:
                snapshots.append(Snapshot(sequence.number, slot))
                sequence.tail = sequence.tail if is_stop else name
        return tuple(snapshots)

    def preempt(self, sequence: Sequence) -> None:
        """Its full blocks will come back as they are, as far as there are slots for them."""
        self.offload.keep(
            sequence, (_digest(sequence, index) for index in range(sequence.num_named))
        )

    def forget(self, sequence: Sequence) -> None:
        """What it holds is not to be found by others."""
        self.pool.forget(sequence.blocks)
        self.offload.forget(_digest(sequence, index) for index in range(sequence.num_named))
        self.states.forget(_digest(sequence, index) for index in range(sequence.num_named))

    def _open_state(self, sequence: Sequence, num_known: int) -> None:
        """Gives it a slot, and stops: the end of `num_known` blocks that others have computed too,
        where prompts part, and its last full block."""
        num_found = sequence.num_named
        name = _digest(sequence, num_found - 1) if num_found else None
        opened = self.states.open(sequence.number, name)
        sequence.state_slot, sequence.state_from = opened
        last = sequence.num_skippable // BLOCK_TOKENS
        places = {num_known, last if last - num_found >= MIN_BLOCKS else 0}
        if self._is_on:
            sequence.stops = {each * BLOCK_TOKENS for each in places if each > num_found}

    def _will_stop(self, other: Sequence, sequence: Sequence) -> bool:
        """Whether `other` is yet to compute a block that both begin with: then it stops behind the
        last of these."""
        num_shareable = min(len(other.ids), sequence.num_skippable) // BLOCK_TOKENS
        num_common = bisect_left(
            range(num_shareable),
            True,
            key=lambda index: _digest(sequence, index) != _digest(other, index),
        )
        end = num_common * BLOCK_TOKENS
        if end <= other.num_computed or num_common <= len(self._find(sequence)):
            return False
        other.stops.add(end)
        return True

    def _will_fill(self, other: Sequence, sequence: Sequence) -> bool:
        num_shareable = min(len(other.ids), sequence.num_skippable) // BLOCK_TOKENS
        for index in range(other.num_named, num_shareable):
            name = _digest(sequence, index)
            if name != _digest(other, index):
                return False
            if self.pool.find(name) is None and not self.offload.holds(name):
                return True
        return False

    def _find(self, sequence: Sequence) -> list[int | None]:
        """Blocks that it can go on behind."""
        found = self._find_blocks(sequence)
        return found[: self._num_resumable(sequence, len(found))]

    def _num_resumable(self, sequence: Sequence, num_found: int) -> int:
        """Returns how many of the blocks that were found have the state behind them."""
        if not self.states.num_slots:
            return num_found
        counts = range(num_found, 0, -1)
        return next((num for num in counts if self.states.holds(_digest(sequence, num - 1))), 0)

    def _find_blocks(self, sequence: Sequence) -> list[int | None]:
        """Blocks that hold the beginning of its known tokens, None for one that lies in a slot. At
        least one token is left to compute; of a prompt to be scored, all that are not."""
        found: list[int | None] = []
        if not self._is_on:
            return found
        for index in range(sequence.num_skippable // BLOCK_TOKENS):
            name = _digest(sequence, index)
            block = self.pool.find(name)
            if block is None and not self.offload.holds(name):
                break
            found.append(block)
        return found

    def _restore(self, sequence: Sequence, index: int, block: int) -> int:
        """The block, which others find from this step on: it is filled before the step's rows."""
        name = _digest(sequence, index)
        self.offload.restore(name, block)
        self.pool.name(block, name)
        return block


def _digest(sequence: Sequence, index: int) -> bytes:
    """Returns the digest of the tokens up to the end of this block. A sequence keeps those that
    were asked for: tokens never change."""
    digests = sequence.digests
    request = sequence.request
    owner = (request.tenant, request.adapter, request.params.adapter or "")
    while len(digests) <= index:
        first = len(digests) * BLOCK_TOKENS
        before = digests[-1] if digests else _hash("\0".join(owner).encode())
        digests.append(
            _hash(before + array("q", sequence.ids[first : first + BLOCK_TOKENS]).tobytes())
        )
    return digests[index]


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()
