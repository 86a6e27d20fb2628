"""The StepPlan: one scheduling decision as a message for every stage, and the tail's answer. Knows
no torch.

A stage keeps for each open sequence its known ids and its block table; `rows` extend both. The same
record restores a tail that was restarted: `opens` carries the whole history.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from shardline.base.errors import ProtocolError
from shardline.contract.job import PromptLogprob, SamplingParams, TokenLogprob
from shardline.contract.wire import Data, decode_or_protocol_error

Number: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""What a frame's header and the sampler's keys can hold."""

Name: TypeAlias = Annotated[str, Meta(max_length=64)]

Refusal: TypeAlias = tuple[int, str]
"""A sequence that a stage cannot compute, and the reason."""

StateSlot: TypeAlias = Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)]

NO_STATE = -1

MAX_DRAFTS = 63
"""Of one row."""


class Open(msgspec.Struct, frozen=True, array_like=True):
    """A sequence's first appearance in this epoch."""

    seq: int
    ids: tuple[int, ...]
    """All known ids: prompt, then generated."""
    num_prompt: Number
    params: SamplingParams
    seed: Number
    num_blocks: Number
    """Most blocks it can ever hold: the width of its block table."""
    num_cached: Number = 0
    """First tokens with KV in its first blocks already: whole blocks, and not all tokens."""
    adapter: Name = ""
    """The fingerprint of its parameters' adapter; empty: it has none."""
    trace: Name = ""
    """The traceparent of its attempt; empty: it is not traced."""
    banned: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens with a last one that never follows the others in the output."""
    labels: tuple[int, ...] = ()
    """Tokens of which its only token is the likeliest; the result has their log-probabilities."""
    num_scored: Number = 0
    """First prompt tokens, but for the very first, with log-probabilities that are known."""
    state: StateSlot = NO_STATE
    """The slot of what recurrent layers keep of it."""
    snapshot: StateSlot = NO_STATE
    """The slot with what they keep behind the cached tokens, copied to its own; none: it has no
    cached tokens."""


class Row(msgspec.Struct, frozen=True, array_like=True):
    """`length` tokens of one sequence from position `start`: a decode or a prefill chunk.

    `ids` are tokens that the stages do not know yet (the token sampled last), appended to the known
    ids before the row runs. `blocks` are appended to its block table. `wants`: sample a token from
    the last position.

    The `length` of a decode counts its token and its `drafts`: guesses of the tokens that follow,
    which count as known ids until the next row. A token is sampled from the last id and from each
    draft, up to the first that is not the next draft. The next row's `start` tells how many drafts
    came true; the others are forgotten, and their KV is written again.
    """

    seq: int
    start: int
    length: int
    ids: tuple[int, ...]
    blocks: tuple[int, ...]
    wants: bool
    drafts: Annotated[tuple[int, ...], Meta(max_length=MAX_DRAFTS)] = ()

    @property
    def decodes(self) -> bool:
        """A decode brings its token; a chunk's are known since the sequence was opened."""
        return bool(self.ids)


class Move(msgspec.Struct, frozen=True, array_like=True):
    """A KV block that is copied to a slot outside the pool, or from it."""

    block: Number
    slot: Number
    is_out: bool


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """The slot that what recurrent layers keep of a sequence is copied to."""

    seq: int
    slot: Number


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step: what to move, open, compute, snapshot and close, in this order. Steps are numbered
    from 0 in each epoch.

    Rows are packed in their order: decode rows first, then prefill chunks.
    """

    step: Number
    opens: tuple[Open, ...]
    rows: tuple[Row, ...]
    closes: tuple[int, ...]
    idle_us: Number = 0
    """How long before it no step was in flight."""
    moves: tuple[Move, ...] = ()
    """One after the other: a later one may take the place of an earlier one."""
    refused: tuple[Refusal, ...] = ()
    """Each stage adds to them: what they get is computed, but means nothing."""
    snapshots: tuple[Snapshot, ...] = ()
    """One after the other; stages without recurrent layers have none."""

    @property
    def num_tokens(self) -> int:
        """Packed rows of the micro-batch."""
        return sum(row.length for row in self.rows)

    @property
    def num_wanting(self) -> int:
        """Rows from which the tail samples: a token each, and one for each draft that came true."""
        return sum(row.wants for row in self.rows)

    @property
    def num_drafts(self) -> int:
        """Guesses among the packed rows."""
        return sum(len(row.drafts) for row in self.rows)

    def check(self, result: StepResult) -> None:
        """Raises ProtocolError for an answer that does not fit this step."""
        if result.step != self.step:
            raise ProtocolError(f"result of step {result.step}, expected {self.step}")
        if len(result.vectors) not in (0, len(self.rows)):
            raise ProtocolError(f"step {self.step} has {len(result.vectors)} vectors")
        wanting = [row for row in self.rows if row.wants]
        if len(result.tokens) != len(wanting) or len(result.logprobs) not in (0, len(wanting)):
            raise ProtocolError(
                f"step {self.step} wants {len(wanting)} tokens, got {len(result.tokens)}"
            )
        if len(result.forced) not in (0, len(wanting)):
            raise ProtocolError(f"step {self.step} has forced tokens of {len(result.forced)} rows")
        for row, tokens, logprobs in zip(
            wanting, result.tokens, result.logprobs or result.tokens, strict=True
        ):
            if (
                not tokens
                or len(logprobs) != len(tokens)
                or tokens[:-1] != row.drafts[: len(tokens) - 1]
            ):
                raise ProtocolError(
                    f"step {self.step}: "
                    f"{len(tokens)} tokens of sequence {row.seq} after other drafts"
                )


class ScoredTokens(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of the prompt tokens that follow the rows of a chunk from `start` on."""

    seq: int
    start: Number
    logprobs: tuple[PromptLogprob, ...]


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """The tail's answer to every step: for each row that wants a token, in the order of the rows,
    the drafts that came true and the token after them.

    `logprobs` has an entry per token (None where not asked for). `bad` names the sequences with
    logits that were not finite where their last token would be: they fail, their neighbors go on.
    """

    step: Number
    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprob | None, ...], ...] = ()
    bad: tuple[int, ...] = ()
    compute_s: float = 0.0
    refused: tuple[Refusal, ...] = ()
    """As the plan had them at the tail: they fail, their neighbors go on."""
    forced: tuple[tuple[Number, ...], ...] = ()
    """For each of `tokens` what its grammar most likely has follow, as drafts of the next row; or
    empty."""
    scored: tuple[ScoredTokens, ...] = ()
    """Of the chunks of sequences that want log-probabilities of their prompts, in their order."""
    vectors: tuple[bytes, ...] = ()
    """Of a model that pools: one for each row, float32 in little-endian order, empty where it is
    not finite."""


_encoder = msgspec.msgpack.Encoder()
_terms_decoder = msgspec.msgpack.Decoder(tuple[SamplingParams, Number])
_plan_decoder = msgspec.msgpack.Decoder(StepPlan)
_result_decoder = msgspec.msgpack.Decoder(StepResult)


def encode(message: StepPlan | StepResult) -> bytes:
    """The message as msgpack."""
    return _encoder.encode(message)


def unsendable(params: SamplingParams, seed: int) -> str | None:
    """Why no stage would take a sequence on these terms; None: it would. A plan with it would end
    everybody's epoch, so it is asked before: its row may have been written by hand."""
    try:
        _terms_decoder.decode(_encoder.encode((params, seed)))
    except (msgspec.MsgspecError, OverflowError, TypeError, ValueError) as error:
        return f"stages do not take its parameters: {error}"
    return None


def decode_plan(data: Data) -> StepPlan:
    """Raises ProtocolError on anything that is no StepPlan."""
    return decode_or_protocol_error(data, _plan_decoder.decode, "not a StepPlan")


def decode_result(data: Data) -> StepResult:
    """Raises ProtocolError on anything that is no StepResult."""
    return decode_or_protocol_error(data, _result_decoder.decode, "not a StepResult")
