"""What the tail keeps of a sequence between its tokens: its history as far as logits depend on it.

Knows no other sequence and draws nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from services.stage.sampling.token_limits import limits_of
from shardline.contract.job import SamplingParams
from shardline_scheduler.step_plan import MAX_DRAFTS, Open
from shardline_server.tokenize.grammars.grammar import GrammarError, GrammarMatcher

NONE_IS_LEFT = (
    "no token may be next: allowed_token_ids, bad_words, min_tokens and structured_outputs "
    "exclude all of them"
)


class SampledSequence:
    """What the tail keeps of an open sequence. `extend` it with the ids of each row before that row
    is sampled.

    Drafts that come true are taken in as they are sampled.
    """

    __slots__ = (
        "_eos_ids",
        "_grammar",
        "_limits",
        "_masked",
        "_num_prompt",
        "_penalties",
        "_vocab_size",
        "index",
        "labels",
        "params",
        "refusal",
        "seed",
        "seq",
    )

    def __init__(
        self, record: Open, *, vocab_size: int, eos_ids: frozenset[int], device: torch.device
    ) -> None:
        params = record.params
        self.seq = record.seq
        self.seed = record.seed
        self.params = params
        self.labels = list(record.labels)
        """If there are any, its token is the likeliest of them."""
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self.index = 0
        """The output index of the token that is sampled next."""
        self._num_prompt = record.num_prompt
        self._masked: list[int] = []
        if params.min_tokens > 0:
            self._masked = [token for token in params.stop_ids(eos_ids) if token < vocab_size]
        self._penalties: _Penalties | None = None
        if _has_penalties(params):
            self._penalties = _Penalties(
                params, record.ids[: record.num_prompt], torch.zeros(vocab_size, device=device)
            )
        self._limits = limits_of(record, vocab_size=vocab_size, device=device)
        self._grammar: GrammarMatcher | None = None
        self.refusal = ""
        """Why it cannot go on, by its grammar or its limits; its tokens mean nothing then."""

    @property
    def num_known(self) -> int:
        """Tokens of prompt and history."""
        return self._num_prompt + self.index

    @property
    def is_adjusted(self) -> bool:
        """Whether logits change before a token is chosen."""
        return (
            self._penalties is not None
            or self._grammar is not None
            or self._limits is not None
            or self._is_masked
        )

    @property
    def _is_masked(self) -> bool:
        return self.index < self.params.min_tokens and bool(self._masked)

    def follow(self, grammar: GrammarMatcher) -> None:
        """Holds its output to a grammar. Call it before `extend`."""
        self._grammar = grammar

    def refuse(self, reason: str) -> None:
        """Lets its grammar go: it fails, with this reason."""
        self.refusal = f"structured_outputs: it cannot be followed: {reason}"
        self._grammar = None

    def refuse_all_tokens(self) -> None:
        """Lets it fail: what it asks for leaves no token to be next."""
        self.refusal = self.refusal or NONE_IS_LEFT

    def extend(self, ids: Sequence[int]) -> None:
        """Adds output tokens to the history."""
        self.index += len(ids)
        if self._penalties is not None and ids:
            self._penalties.extend(ids)
        if self._limits is not None:
            self._limits.extend(ids)
        if self._grammar is not None:
            try:
                self._grammar.take(ids)
            except GrammarError as error:
                self.refuse(str(error))

    def adjusted(self, row: Tensor) -> Tensor:
        """Returns the logits [V], float32, with bias and penalties, with the tokens masked that its
        limits or its grammar do not allow, and with stop tokens masked until `min_tokens`.

        The given row is not changed.
        """
        if self._limits is not None:
            row = self._limits.biased(row)
        if self._penalties is not None:
            row = self._penalties.applied(row)
        if self._grammar is not None:
            row = self._by_grammar(row, self._grammar)
        if self._limits is not None:
            row = self._limits.masked(row)
        if self._is_masked and self._grammar is None:
            row = row.clone()
            row[self._masked] = -math.inf
        return row

    def forced_after(self, token_id: int) -> tuple[int, ...]:
        """Returns the tokens that its grammar most likely has follow this one, which was sampled
        last."""
        if self._grammar is None or token_id in self._eos_ids:
            return ()
        try:
            forced = self._grammar.forced_after(token_id)
        except GrammarError as error:
            self.refuse(str(error))
            return ()
        return tuple(takewhile(lambda each: each not in self._eos_ids, forced))[:MAX_DRAFTS]

    def ends_with(self, token_id: int) -> bool:
        """Whether its text ends with this token, whatever follows."""
        return self._grammar is not None and token_id in self._eos_ids

    @property
    def is_held_by_grammar_alone(self) -> bool:
        """Whether nothing but its grammar changes its logits."""
        return (
            self._grammar is not None
            and self._penalties is None
            and self._limits is None
            and not self._is_masked
        )

    def allows(self, token_id: int) -> bool:
        """Whether its grammar, if it has one, lets this token be next. Needs no mask."""
        return self._grammar is None or self._grammar.allows(token_id)

    def _by_grammar(self, row: Tensor, grammar: GrammarMatcher) -> Tensor:
        try:
            bits = np.frombuffer(grammar.allowed(), dtype=np.uint8)
        except GrammarError as error:
            self.refuse(str(error))
            return row
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little")
        if self._is_masked:
            without_ends = allowed.copy()
            without_ends[self._masked] = 0
            # A grammar that can only end ends before `min_tokens`.
            allowed = without_ends if without_ends.any() else allowed
        # Infinity with the sign of each token: its minimum takes a sixth of a masked_fill's time.
        bounds = torch.from_numpy(allowed).to(row.device).float().sub_(0.5).mul_(math.inf)
        return torch.minimum(row, bounds, out=bounds)


class _Penalties:
    """Two vectors over the vocabulary: what a token's logit is divided by, and what is taken off
    it."""

    __slots__ = ("_counts", "_divisor", "_params", "_shift")

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], zeros: Tensor) -> None:
        self._params = params
        self._counts: Counter[int] = Counter()
        self._shift = zeros
        self._divisor = torch.ones_like(zeros)
        self._divisor[list(prompt_ids)] = params.repetition_penalty

    def extend(self, ids: Sequence[int]) -> None:
        params = self._params
        self._counts.update(ids)
        for token in set(ids):
            self._divisor[token] = params.repetition_penalty
            self._shift[token] = (
                params.presence_penalty + params.frequency_penalty * self._counts[token]
            )

    def applied(self, row: Tensor) -> Tensor:
        """Returns the logits [V], float32, with penalties. Repetition divides positive logits and
        multiplies others."""
        return row.clamp(min=0) / self._divisor + row.clamp(max=0) * self._divisor - self._shift


def _has_penalties(params: SamplingParams) -> bool:
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (
        1.0,
        0.0,
        0.0,
    )
