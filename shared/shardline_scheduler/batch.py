"""The batch of one epoch: the sequences that have a seat, the KV that they hold, and how they
leave.

    waiting ──start──▶ prefilling ──its last chunk──▶ in flight ◀──decode · token──▶ ready
       ▲                   └───────────────┬──────────────┴───────────────────────────┘
       │                                 leave
       │                                   ▼
       └───if it was preempted──settle── leaving: steps in flight still use its blocks

A sequence that is aborted, finished, failed or preempted leaves in the same way. Its blocks come
back when the last step that has a row of it has come back, because stages write into them until
then.
"""

from __future__ import annotations

from operator import attrgetter

from shardline_scheduler.adapter_room import AdapterRoom
from shardline_scheduler.offload import Offload
from shardline_scheduler.prefix_cache import PrefixCache
from shardline_scheduler.scheduler_config import SchedulerConfig
from shardline_scheduler.sequence import Sequence, State, WaitingQueue
from shardline_scheduler.step_cost import StepCost


class Batch:
    """Sequences by the number that names them to the stages. A new epoch has a new batch."""

    def __init__(self, config: SchedulerConfig, waiting: WaitingQueue, step_cost: StepCost) -> None:
        offloads = config.prefix_cache and not config.is_recurrent
        self.kv = PrefixCache(
            config.num_blocks,
            is_on=config.prefix_cache,
            num_slots=config.offload.num_slots if offloads else 0,
            num_states=config.num_states,
        )
        self.running: dict[int, Sequence] = {}
        self.prefilling: dict[int, Sequence] = {}
        self.ready: dict[int, Sequence] = {}
        """Decodes with a token that has come back, longest ago first."""
        self.leaving: dict[int, Sequence] = {}
        self.in_quarantine: Sequence | None = None
        """The one that may have killed an engine, and therefore runs without another one of its
        kind."""
        self.step_cost = step_cost
        self._config = config
        self._waiting = waiting
        self._adapters = AdapterRoom(config.max_adapters)
        self._closes: list[int] = []

    @property
    def is_full(self) -> bool:
        """Whether every seat is taken, or the stages hold as many states as they can: a sequence
        that leaves keeps its own until the plan that closes it."""
        config = self._config
        if config.is_recurrent and len(self.running) + len(self._closes) >= config.num_states:
            return True
        return len(self.running) == config.max_seats

    @property
    def num_decoding(self) -> int:
        """Counts the sequences with all known tokens computed or in flight."""
        return len(self.running) - len(self.prefilling)

    @property
    def has_closes(self) -> bool:
        """Whether stages are still to hear of sequences that have left."""
        return bool(self._closes)

    @property
    def offload(self) -> Offload:
        """The slots outside the pool that keep KV of preempted sequences."""
        return self.kv.offload

    def may_start(self, sequence: Sequence) -> bool:
        """Whether there are blocks for a sequence's known tokens, a place for its adapter, and no
        other sequence that is just computing the beginning of its prompt."""
        return (
            self.has_place(sequence)
            and self.kv.has_room(sequence, len(self.running))
            and not self.kv.awaits(sequence, self.prefilling.values())
        )

    def has_place(self, sequence: Sequence) -> bool:
        """Whether there is a place for a sequence's adapter; it may need none."""
        return self._adapters.has(sequence.request.adapter)

    def start(self, sequence: Sequence, number: int) -> None:
        """Gives a waiting sequence a seat, a number and its blocks."""
        self._waiting.remove(sequence)
        sequence.number = number
        sequence.state = State.RUNNING
        sequence.num_at_start = len(sequence.ids)
        self.kv.open(sequence)
        self._adapters.open(number, sequence.request.adapter)
        self.running[number] = sequence
        self.prefilling[number] = sequence
        if sequence.quarantined:
            self.in_quarantine = sequence

    def grow(self, sequence: Sequence) -> bool:
        """Gives a sequence one more block, if need be that of the last one in order, which is
        preempted.

        False: not in this step. Blocks come back with a step in flight, or the sequence itself was
        preempted.
        """
        while not self.kv.pool.can_allocate(1):
            if any(each.blocks for each in self.leaving.values()):
                return False  # To preempt more would only waste a prefill.
            victim = max(self.running.values(), key=attrgetter("order"))
            self.leave(victim, State.PREEMPTED)
            if victim is sequence:
                return False
        sequence.blocks.extend(self.kv.pool.allocate(1))
        return True

    def leave(self, sequence: Sequence, state: State) -> None:
        """Takes a sequence out of the batch, as ended or as preempted. The next plan closes it."""
        number = sequence.number
        sequence.state = state
        del self.running[number]
        self.prefilling.pop(number, None)
        self.ready.pop(number, None)
        self._closes.append(number)
        self.leaving[number] = sequence
        if sequence.request.adapter and sequence.num_in_flight:
            # A stage may have refused the adapter, and load it for the next that finds this KV.
            self.kv.forget(sequence)
        self.settle(sequence)

    def settle(self, sequence: Sequence) -> None:
        """Frees the blocks of a sequence that leaves, once no step in flight uses them."""
        if sequence.num_in_flight > 0 or sequence.number not in self.leaving:
            return
        del self.leaving[sequence.number]
        is_preempted = sequence.state is State.PREEMPTED
        if is_preempted and self.step_cost.is_above(self._config.offload.move_s):
            self.kv.preempt(sequence)
        self.kv.pool.free(sequence.blocks)
        if self.in_quarantine is sequence:
            self.in_quarantine = None
        if is_preempted:
            sequence.patience = 0
            self._waiting.requeue(sequence)

    def take_closes(self) -> list[int]:
        """The numbers that the plan which is made now closes; their adapters' places and states are
        free for the next one."""
        closes = self._closes
        self._closes = []
        self._adapters.close(closes)
        self.kv.states.close(closes)
        return closes
