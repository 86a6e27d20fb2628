"""One job's tokens inside the engine: what was asked, what is known, what is in flight. Knows no
torch, no tokenizer.

A sequence has no phases: `num_computed` catches up with its ids. KV is a cache: losing it costs one
prefill of `ids`.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain, repeat
from typing import Protocol

from shardline.base.errors import ProtocolError
from shardline.contract.job import (
    DEFAULT_PRIORITY,
    INTERACTIVE,
    FinishReason,
    PromptLogprob,
    SamplingParams,
    TokenLogprob,
)
from shardline_scheduler.kv_blocks import blocks_for
from shardline_scheduler.prompt_lookup import PromptLookup
from shardline_scheduler.step_plan import MAX_DRAFTS, NO_STATE, Row, ScoredTokens

Key = tuple[str, int]
"""(job id, fence): one attempt."""

Logprobs = tuple[TokenLogprob | None, ...]
"""One for each token, None where none was asked for; or empty."""

MAX_OVERTAKEN = 32
"""Smaller requests that one without room lets pass; what was preempted lets none, or both would
take turns for ever."""


class TokenSink(Protocol):
    """Turns output tokens into text and decides when a completion ends. A pure function of the
    tokens pushed so far."""

    def push(self, token_id: int, /) -> tuple[str, FinishReason | None]:
        """The text that this token settles, and the reason if it is the last: then with all that
        was held back."""

    def flush(self) -> str:
        """The text still held back, when a completion is ended before its time."""

    @property
    def text(self) -> str:
        """All text given out so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One attempt at a job. `output_ids` and `output_logprobs` are the checkpoint of an earlier
    attempt."""

    key: Key
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    output_ids: tuple[int, ...] = ()
    output_logprobs: tuple[TokenLogprob, ...] = ()
    priority: int = DEFAULT_PRIORITY
    quarantined: bool = False
    """It may have killed an engine before: runs only when no other quarantined one does."""
    parked: bool = False
    """It found no room when it was claimed: runs only after `begin`."""
    tenant: str = ""
    """The owner: KV is shared within a tenant only."""
    adapter: str = ""
    """The fingerprint of its adapter: KV is shared with the same one of the same name only."""
    trace: str = ""
    """The traceparent of the attempt; empty: it is not traced."""
    banned: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that must not be in its output: those of its bad words."""
    labels: tuple[int, ...] = ()
    """Of a question: the tokens that answers to it begin with."""
    refusal: str = ""
    """Why it can never run here, if it cannot."""


class State(Enum):
    """waiting → running → ended, and running → preempted → waiting."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    """Out of the batch, but steps in flight still use its blocks."""
    ENDED = auto()


class Sequence:
    """Mutable, owned by the scheduler. `number` names it to the stages: a new one for each
    admission."""

    __slots__ = (
        "blocks",
        "called",
        "digests",
        "end",
        "forced",
        "ids",
        "logprobs",
        "lookup",
        "most_blocks",
        "most_tokens",
        "num_at_start",
        "num_cached",
        "num_computed",
        "num_in_flight",
        "num_named",
        "num_sent",
        "number",
        "order",
        "parked",
        "patience",
        "quarantined",
        "request",
        "scores",
        "sink",
        "state",
        "state_from",
        "state_slot",
        "stops",
        "tail",
    )

    def __init__(self, request: Request, sink: TokenSink, *, arrival: int, max_len: int) -> None:
        num_prompt = len(request.prompt_ids)
        self.request = request
        self.sink = sink
        self.order = (request.priority, arrival)
        """The least is served first and preempted last."""
        self.patience = MAX_OVERTAKEN
        self.most_tokens = min(max_len, num_prompt + (request.params.max_tokens or max_len))
        self.most_blocks = blocks_for(self.most_tokens)
        self.ids = list(request.prompt_ids)
        self.lookup = PromptLookup()
        self.forced: tuple[int, ...] = ()
        """What its grammar most likely has follow its ids."""
        self.logprobs: list[TokenLogprob] = []
        self.scores: list[PromptLogprob] = []
        """Of the prompt's tokens from the second one on, as far as they are computed."""
        self.end: FinishReason | None = None
        """Of a completion that is whole: its prompt is still to be scored."""
        self.state = State.WAITING
        self.quarantined = request.quarantined
        """Must not change while the sequence waits in a line."""
        self.parked = request.parked
        self.called = False
        """Parked, and there was room for it."""
        self.num_at_start = len(self.ids)
        self.digests: list[bytes] = []
        """Of its first blocks of tokens, as far as they were asked for."""
        self.num_cached: int | None = None
        """Prompt tokens with KV that was there when it was first admitted."""
        self.forget_kv()

    def forget_kv(self) -> None:
        """No stage knows it any more."""
        self.number = -1
        self.blocks: list[int] = []
        self.num_sent = 0
        """Blocks that the stages know."""
        self.num_named = 0
        """Full blocks with tokens that the prefix cache knows."""
        self.num_computed = 0
        self.num_in_flight = 0
        self.state_slot = NO_STATE
        self.state_from = NO_STATE
        """The slot of the snapshot that it began with."""
        self.stops: set[int] = set()
        """Numbers of tokens behind which a chunk ends, for a snapshot."""
        self.tail: bytes | None = None
        """The name of the last snapshot behind all tokens that were known: the next replaces it."""

    @property
    def is_interactive(self) -> bool:
        """Whether somebody waits for it."""
        return self.request.priority in INTERACTIVE

    @property
    def num_outputs(self) -> int:
        """Output tokens known so far."""
        return len(self.ids) - len(self.request.prompt_ids)

    @property
    def num_missing(self) -> int:
        """Known ids that no step has been given yet."""
        return len(self.ids) - self.num_computed

    def up_to_stop(self, most: int) -> int:
        """Returns how many of its next ids a chunk of `most` takes: none behind a stop."""
        ahead = (stop - self.num_computed for stop in self.stops if stop > self.num_computed)
        return min(most, min(ahead, default=most))

    @property
    def num_unscored(self) -> int:
        """Prompt tokens with log-probabilities that are wanted and not yet known."""
        if self.request.params.prompt_logprobs is None:
            return 0
        return len(self.request.prompt_ids) - 1 - len(self.scores)

    @property
    def num_skippable(self) -> int:
        """First known tokens that need no row where their KV is found: the last one's logits are
        wanted, and those of tokens that the next ones are scored by."""
        return len(self.scores) if self.num_unscored else len(self.ids) - 1

    @property
    def has_progress(self) -> bool:
        """A token came since it was admitted last."""
        return len(self.ids) > self.num_at_start

    @property
    def output_ids(self) -> tuple[int, ...]:
        """The output tokens known so far."""
        return tuple(self.ids[len(self.request.prompt_ids) :])

    def draft(self, most: int) -> tuple[int, ...]:
        """Returns at most `most` guesses of its next tokens. The one after them can be its last."""
        most = max(0, min(most, MAX_DRAFTS, self.most_tokens - len(self.ids) - 1))
        return self.forced[:most] or self.lookup.draft(self.ids, most)

    def learn(self, row: Row, num_accepted: int, forced: tuple[int, ...]) -> None:
        """Learns how many drafts of a row came true, and which tokens its grammar has follow."""
        if row.drafts and not self.forced:
            self.lookup.learn(num_accepted)
        self.forced = forced

    def score(self, row: Row, scored: ScoredTokens | None) -> None:
        """Takes the log-probabilities of the prompt tokens that follow those of a chunk. Raises
        ProtocolError if they are not the next ones, or some are missing."""
        if scored is not None:
            place = scored.start + 1
            followed = self.request.prompt_ids[place : place + len(scored.logprobs)]
            if scored.start != len(self.scores) or followed != tuple(
                each.token_id for each in scored.logprobs
            ):
                raise ProtocolError(f"sequence {row.seq} is scored by other tokens than its own")
            self.scores += scored.logprobs
        if row.wants and self.num_unscored:
            raise ProtocolError(f"{self.num_unscored} tokens of sequence {row.seq} have no score")

    def replay(self) -> FinishReason | None:
        """Runs the finish rules over the checkpoint; tokens past the end are dropped. A completion
        that is whole ends once its prompt is scored."""
        self.end = self.accept(self.request.output_ids, self.request.output_logprobs)[1]
        return None if self.num_unscored else self.end

    def accept(
        self, tokens: tuple[int, ...], logprobs: Logprobs
    ) -> tuple[str, FinishReason | None]:
        """Appends output tokens up to the last that there can be; the text they settle and the
        reason if it ends."""
        parts: list[str] = []
        for token, logprob in zip(tokens, chain(logprobs, repeat(None)), strict=False):
            self.ids.append(token)
            if logprob is not None:
                self.logprobs.append(logprob)
            text, reason = self.sink.push(token)
            parts.append(text)
            if reason is not None:
                return "".join(parts), reason
        return "".join(parts), None


class WaitingQueue:
    """Sequences that wait for a place, by (priority, arrival). Quarantined ones stand in a separate
    line."""

    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines: tuple[list[tuple[tuple[int, int], Sequence]], ...] = ([], [])

    def __bool__(self) -> bool:
        return any(self._lines)

    def push(self, sequence: Sequence) -> None:
        """A preempted sequence keeps its order, so it stands before all that came later."""
        heapq.heappush(self._lines[sequence.quarantined], (sequence.order, sequence))

    def requeue(self, sequence: Sequence) -> None:
        """Takes back a sequence that had a seat: no stage knows it any more, and it is computed
        again."""
        sequence.forget_kv()
        sequence.state = State.WAITING
        self.push(sequence)

    def first(self, num: int, *, with_quarantined: bool) -> list[Sequence]:
        """Returns those with the next turns. Quarantined ones that may not run now hold up no
        others."""
        lines = self._lines[: 1 + with_quarantined]
        return [sequence for _, sequence in heapq.nsmallest(num, chain.from_iterable(lines))]

    def remove(self, sequence: Sequence) -> None:
        """Takes it out of its line, wherever it stands."""
        line = self._lines[sequence.quarantined]
        if line[0][1] is sequence:
            heapq.heappop(line)
        else:
            line.remove((sequence.order, sequence))
            heapq.heapify(line)
