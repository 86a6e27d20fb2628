"""The scheduler: cuts steps, owns the KV of every stage, decides who runs. Knows no torch, Redis,
Celery or tokenizer.

Pure and single-threaded: the same calls in the same order give the same plans, so a simulation
tests all of it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import count, repeat

from shardline.base.errors import ProtocolError
from shardline.contract.job import FinishReason
from shardline_scheduler.batch import Batch
from shardline_scheduler.events import (
    Event,
    KvExceeded,
    MayBegin,
    NewTokens,
    SequenceCrashed,
    SequenceFailed,
    SequenceFinished,
)
from shardline_scheduler.kv_blocks import blocks_for
from shardline_scheduler.offload import OffloadTerms
from shardline_scheduler.parking import Parking
from shardline_scheduler.quarantine import Quarantine
from shardline_scheduler.scheduler_config import SchedulerConfig
from shardline_scheduler.sequence import (
    Key,
    Logprobs,
    Request,
    Sequence,
    State,
    TokenSink,
    WaitingQueue,
)
from shardline_scheduler.step_cost import StepCost
from shardline_scheduler.step_cutter import StepCutter
from shardline_scheduler.step_plan import StepPlan, StepResult

NOT_FINITE = "the model's logits were not finite"


class Scheduler:
    """The hot loop is `schedule` → stages → `apply`. A sequence that leaves gets one close, in the
    next plan."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.step_cost = StepCost()
        self._by_key: dict[Key, Sequence] = {}
        self._waiting = WaitingQueue()
        self._parked = Parking()
        self._arrivals = count()
        self._numbers = count()
        self._quarantine = Quarantine()
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._batch = Batch(self.config, self._waiting, self.step_cost)
        self._cutter = StepCutter(self._waiting, self._batch, self._numbers)
        self._next_step = 0
        self._flights: deque[tuple[StepPlan, list[Sequence]]] = deque()

    # What the engine asks for.

    def add(self, request: Request, sink: TokenSink) -> list[Event]:
        """Takes a request in. The events follow at once: it can never run here, or its checkpoint
        is complete."""
        assert request.key not in self._by_key, f"{request.key} was added twice"
        sequence = Sequence(
            request, sink, arrival=next(self._arrivals), max_len=self.config.max_len
        )
        sequence.quarantined = request.quarantined or request.key[0] in self._quarantine
        self._by_key[request.key] = sequence
        self._line_of(sequence).push(sequence)
        if (refusal := self.config.refusal(request)) is not None:
            return [self._fail(sequence, refusal)]
        if (reason := sequence.replay()) is not None:
            return [self._finish(sequence, reason)]
        return [self._outgrow(sequence)] if self._is_too_long(sequence) else []

    def abort(
        self, key: Key, reason: FinishReason = FinishReason.CANCELLED
    ) -> SequenceFinished | None:
        """Drops a job; what it has so far. None: it is not here (any more)."""
        sequence = self._by_key.get(key)
        if sequence is None:
            return None
        tail = sequence.sink.flush()
        return self._finish(sequence, reason, tail)

    def begin(self, key: Key) -> None:
        """A parked request may run from now on."""
        sequence = self._by_key.get(key)
        if sequence is not None and sequence.parked:
            self._parked.remove(sequence)
            sequence.parked = False
            self._waiting.push(sequence)

    def may_begin(self) -> list[Event]:
        """The parked requests that there is room for. Who waits for it and has begun goes first."""
        if any(map(self._batch.has_place, self._cutter.foremost())):
            return []
        num_free = self._batch.kv.pool.num_free
        num_running = self.num_running
        called = self._parked.call(num_free, num_running, max_seats=self.config.most_running)
        return [MayBegin(key=sequence.request.key) for sequence in called]

    def release(self, key: Key) -> None:
        """A quarantined job's tokens are saved: what happens now is no crash of this attempt. The
        next may run."""
        sequence = self._by_key.get(key)
        if sequence is None or not sequence.quarantined:
            return
        if sequence.state is State.WAITING:
            self._line_of(sequence).remove(sequence)
            sequence.quarantined = False
            self._line_of(sequence).push(sequence)
        self._release(sequence)

    def has(self, key: Key) -> bool:
        """Whether this attempt waits or runs here."""
        return key in self._by_key

    def schedule(self) -> StepPlan | None:
        """The next step, to be sent to every stage. None: nothing can run before a result, or
        nothing is left."""
        if len(self._flights) >= self.config.num_lanes:
            return None
        batch = self._batch
        builder = self._cutter.cut(self.config)
        if not builder.rows and (self._flights or not batch.has_closes):
            return None
        batch.kv.keep(builder.sequences)
        plan = builder.plan(
            self._next_step,
            snapshots=batch.kv.take_snapshots(builder.sequences),
            closes=batch.take_closes(),
            moves=batch.offload.take_moves(),
        )
        self._next_step += 1
        self._flights.append((plan, builder.sequences))
        return plan

    def apply(self, result: StepResult) -> list[Event]:
        """The tail's answer to the oldest step in flight. Raises ProtocolError on any other."""
        plan, sequences = self._land(result)
        answers = zip(
            result.tokens, result.logprobs or repeat(()), result.forced or repeat(()), strict=False
        )
        events: list[Event] = []
        refused = dict(result.refused)
        vectors = dict(zip((row.seq for row in plan.rows), result.vectors, strict=False))
        for row, sequence in zip(plan.rows, sequences, strict=True):
            sequence.num_in_flight -= 1
            reason = refused.get(row.seq, "")
            if sequence.state is State.ENDED and (reason or row.seq in result.bad):
                self._batch.kv.forget(sequence)
            # Before a bad row there may be tokens that end it.
            if reason and row.seq not in result.bad and sequence.state is not State.ENDED:
                events.append(self._fail(sequence, reason))
            if row.wants:
                tokens, logprobs, forced = next(answers)
                if sequence.end is not None and sequence.state is not State.ENDED:
                    events.append(self._finish(sequence, sequence.end))
                sequence.learn(row, len(tokens) - 1, forced)
                is_bad = row.seq in result.bad
                if sequence.state is not State.ENDED and (
                    good := tokens[:-1] if is_bad else tokens
                ):
                    self._take(sequence, good, logprobs, events)
                if sequence.state is not State.ENDED and is_bad:
                    events.append(self._fail(sequence, reason or NOT_FINITE))
            if self.config.pools and sequence.state is not State.ENDED:
                events.append(self._take_vector(sequence, vectors.get(row.seq, b"")))
            self._batch.settle(sequence)
        return events

    def rebuild(
        self,
        num_blocks: int,
        num_lanes: int | None = None,
        offload: OffloadTerms | None = None,
        num_states: int | None = None,
    ) -> list[Event]:
        """A new epoch: stages know nothing, steps in flight are lost, every sequence waits again
        with its tokens. What is None stays as it was."""
        config = self.config
        self.config = replace(
            config,
            num_blocks=num_blocks,
            num_lanes=num_lanes or config.num_lanes,
            offload=offload or config.offload,
            num_states=config.num_states if num_states is None else num_states,
        )
        old = self._batch
        self._begin_epoch()
        events: list[Event] = []
        for sequence in (*old.running.values(), *old.leaving.values()):
            if sequence.state is State.ENDED:
                continue
            if sequence is old.in_quarantine and not sequence.has_progress:
                events.append(self._crash(sequence))
                continue
            # One of those that the epoch gave no token may have broken it: they come back one by
            # one.
            if not sequence.has_progress:
                self._put_in_quarantine(sequence)
            self._waiting.requeue(sequence)
        return [
            *events,
            *(
                self._outgrow(each)
                for each in list(self._by_key.values())
                if self._is_too_long(each)
            ),
        ]

    @property
    def num_running(self) -> int:
        """Seats taken."""
        return len(self._batch.running)

    @property
    def num_waiting(self) -> int:
        """Requests without a seat."""
        return len(self._by_key) - self.num_running

    @property
    def num_in_flight(self) -> int:
        """Steps sent and not answered."""
        return len(self._flights)

    @property
    def blocks_used(self) -> int:
        """KV blocks held, those included that steps in flight still use."""
        return self._batch.kv.pool.num_used

    @property
    def slots_used(self) -> int:
        """Slots kept for preempted sequences."""
        return self._batch.offload.num_used

    @property
    def num_snapshots(self) -> int:
        """Slots of states that hold a snapshot."""
        return self._batch.kv.states.num_snapshots

    @property
    def idle(self) -> bool:
        """Nothing waits, runs, is in flight or is still to be closed."""
        return not (self._by_key or self._flights or self._batch.has_closes)

    # What becomes of a sequence.

    def _land(self, result: StepResult) -> tuple[StepPlan, list[Sequence]]:
        if not self._flights:
            raise ProtocolError(f"result of step {result.step}, expected none")
        plan, sequences = self._flights[0]
        plan.check(result)
        scored = {each.seq: each for each in result.scored}
        refused = dict(result.refused)
        for row, sequence in zip(plan.rows, sequences, strict=True):
            if row.seq not in refused and sequence.state is not State.ENDED:
                sequence.score(row, scored.get(row.seq))
        return self._flights.popleft()

    def _take(
        self, sequence: Sequence, tokens: tuple[int, ...], logprobs: Logprobs, events: list[Event]
    ) -> None:
        """Drafts that came true and the token after them, up to the one that ends it."""
        start = sequence.num_outputs
        text, reason = sequence.accept(tokens, logprobs)
        num = sequence.num_outputs - start
        known = tuple(each for each in logprobs[:num] if each is not None)
        key = sequence.request.key
        ids = tokens[:num]
        events.append(NewTokens(key=key, start=start, ids=ids, text=text, logprobs=known))
        sequence.num_computed += num - 1
        if num > 1:
            self._batch.kv.keep((sequence,))
        if sequence.quarantined and not sequence.request.quarantined:
            # A broken pipeline is seen here; only a dead head needs saved tokens.
            self._release(sequence)
        if reason is not None:
            events.append(self._finish(sequence, reason))
        elif self._is_too_long(sequence):
            events.append(self._outgrow(sequence))
        elif sequence.state is State.RUNNING:
            self._batch.ready[sequence.number] = sequence

    def _take_vector(self, sequence: Sequence, vector: bytes) -> Event:
        """The only answer to a sequence that is pooled. Without one it fails."""
        if sequence.quarantined:
            self._release(sequence)
        if not vector:
            return self._fail(sequence, NOT_FINITE)
        self._end(sequence)
        return SequenceFinished.of(sequence, FinishReason.STOP, "", vector)

    def _is_too_long(self, sequence: Sequence) -> bool:
        """All KV together does not hold what is known of it. What it may need later is no reason:
        it may end before."""
        return blocks_for(len(sequence.ids)) > self.config.num_blocks

    def _finish(self, sequence: Sequence, reason: FinishReason, tail: str = "") -> SequenceFinished:
        self._end(sequence)
        return SequenceFinished.of(sequence, reason, tail)

    def _fail(self, sequence: Sequence, reason: str) -> SequenceFailed:
        self._batch.kv.forget(sequence)
        self._end(sequence)
        return SequenceFailed(key=sequence.request.key, reason=reason)

    def _outgrow(self, sequence: Sequence) -> KvExceeded:
        self._end(sequence)
        return KvExceeded(key=sequence.request.key, num_tokens=len(sequence.ids))

    def _crash(self, sequence: Sequence) -> SequenceCrashed:
        del self._by_key[sequence.request.key]
        sequence.state = State.ENDED
        return SequenceCrashed(key=sequence.request.key)

    def _put_in_quarantine(self, sequence: Sequence) -> None:
        sequence.quarantined = True
        self._quarantine.add(sequence.request.key[0])

    def _release(self, sequence: Sequence) -> None:
        sequence.quarantined = False
        self._quarantine.discard(sequence.request.key[0])
        if self._batch.in_quarantine is sequence:
            self._batch.in_quarantine = None

    def _end(self, sequence: Sequence) -> None:
        del self._by_key[sequence.request.key]
        if sequence.state is State.RUNNING:
            self._batch.leave(sequence, State.ENDED)
        elif sequence.state is State.WAITING:
            self._line_of(sequence).remove(sequence)
            self._batch.offload.drop(sequence)
        sequence.state = State.ENDED

    def _line_of(self, sequence: Sequence) -> WaitingQueue:
        return self._parked if sequence.parked else self._waiting
