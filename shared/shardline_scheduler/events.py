"""What the scheduler reports of a job: new tokens, and the one event that ends it. Knows neither
rows nor streams."""

from __future__ import annotations

import msgspec

from shardline.contract.job import FinishReason, PromptLogprob, TokenLogprob
from shardline_scheduler.sequence import Key, Sequence


class NewTokens(msgspec.Struct, frozen=True, kw_only=True):
    """New output tokens of a job from output index `start`, and the text they settle."""

    key: Key
    start: int
    ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class SequenceFinished(msgspec.Struct, frozen=True, kw_only=True):
    """A completion ended: all of its output, checkpointed tokens included."""

    key: Key
    reason: FinishReason
    output_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None
    tail: str = ""
    """The end of `text` that no NewTokens held: it was held back when the job was aborted."""
    num_cached: int = 0
    """Prompt tokens that were not computed for it: their KV was there."""
    prompt_logprobs: tuple[PromptLogprob | None, ...] | None = None
    """One for each token of the prompt, None for the first; None if they were not asked for, or not
    all are computed."""
    vector: bytes = b""
    """Of a model that pools: float32 in little-endian order."""

    @classmethod
    def of(
        cls, sequence: Sequence, reason: FinishReason, tail: str, vector: bytes = b""
    ) -> SequenceFinished:
        """What a sequence has when it ends."""
        return cls(
            key=sequence.request.key,
            reason=reason,
            output_ids=sequence.output_ids,
            text=sequence.sink.text,
            logprobs=None if sequence.request.params.logprobs is None else tuple(sequence.logprobs),
            tail=tail,
            num_cached=sequence.num_cached or 0,
            prompt_logprobs=None
            if sequence.request.params.prompt_logprobs is None or sequence.num_unscored
            else (None, *sequence.scores),
            vector=vector,
        )


class SequenceFailed(msgspec.Struct, frozen=True, kw_only=True):
    """A job that cannot go on, here or elsewhere."""

    key: Key
    reason: str


class SequenceCrashed(msgspec.Struct, frozen=True, kw_only=True):
    """The pipeline broke twice under a job that got no token, the second time while it was the only
    quarantined one."""

    key: Key


class MayBegin(msgspec.Struct, frozen=True, kw_only=True):
    """There is room for a parked job: it waits for `begin`."""

    key: Key


class KvExceeded(msgspec.Struct, frozen=True, kw_only=True):
    """A job needs more KV than this pipeline has: it goes back, and another pipeline goes on where
    it stopped."""

    key: Key
    num_tokens: int
    """Prompt and output so far."""


Event = NewTokens | SequenceFinished | SequenceFailed | SequenceCrashed | MayBegin | KvExceeded
