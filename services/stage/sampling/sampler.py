"""The sampler: logits to tokens, at the tail. A token depends on nothing but its own row,
parameters, seed and history.

So that bits do not depend on other rows, only operations that are exact in any order (conversion,
comparison, maximum) run over all rows at once; operations that round run row by row. Random numbers
come from a keyed hash, one per proposed token, the same on every device and in every version of
torch. Knows no scheduler, no hop and no tokenizer.

Letters of shapes: R rows that may be sampled, V the vocabulary, P the vocabulary padded to whole
tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, count, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from services.stage.sampling import triton_draws
from services.stage.sampling.batched_draws import draw_ahead
from services.stage.sampling.sampled_sequence import SampledSequence
from services.stage.sampling.triton_draws import NONE_DRAWN, NONE_LEFT, NOT_FINITE
from services.stage.sampling.uniform import uniform
from shardline.base.errors import Invalid
from shardline.base.rounding import round_up
from shardline.contract.job import SamplingParams, TokenLogprob
from shardline_scheduler.step_plan import Open, Refusal
from shardline_server import failpoints
from shardline_server.failpoints import Point, is_struck
from shardline_server.tokenize.grammars.grammar import GrammarError, Grammars

TILE = 128
"""Weights are summed by tiles, then tiles one by one in float64: ten times faster than a running
sum, and ordered."""

NO_TOKEN = -1
"""Of a row that is no distribution, as the model gave it or as penalties made it."""

LOG2_E = math.log2(math.e)
LEAST_TEMPERATURE = 1e-5
"""Lower temperatures, except 0, draw as this one does: only ties are left to chance, and no scale
overflows."""


class Sample(NamedTuple):
    """What was sampled of each sequence, as a StepResult needs it; `logprobs` is empty if none
    needs them.

    `bad` names the sequences with logits that were not finite, or not after their penalties: their
    last token is 0.
    """

    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprob | None, ...], ...]
    bad: tuple[int, ...]
    refused: tuple[Refusal, ...] = ()
    """The sequences that cannot go on by their grammar or limits, and why: their tokens mean
    nothing."""
    forced: tuple[tuple[int, ...], ...] = ()
    """For each sequence the tokens that its grammar has follow; empty if there are none."""


class _Run(NamedTuple):
    """The tokens sampled of one sequence, each from its own row of `rows`."""

    rows: Sequence[Tensor]
    tokens: tuple[int, ...]
    is_good: bool
    """The last token's row is a distribution; those before it are."""


class Sampler:
    """Samples tokens on a tail. Used by one thread: it keeps a buffer."""

    def __init__(
        self,
        *,
        vocab_size: int,
        eos_ids: Iterable[int],
        device: torch.device | str = "cpu",
        grammars: Callable[[], Grammars] | None = None,
    ) -> None:
        """`grammars` gives those of the model when a sequence needs one. None: the model has no
        tokenizer."""
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._device = torch.device(device)
        self._grammars = grammars
        self._weights = torch.zeros(round_up(vocab_size, TILE), device=self._device)
        self._draws = triton_draws.load(
            self._device, log2_e=LOG2_E, least_temperature=LEAST_TEMPERATURE
        )

    def open(self, record: Open) -> SampledSequence:
        """Returns the state of a sequence that is opened, or restored, in this epoch."""
        sequence = SampledSequence(
            record, vocab_size=self._vocab_size, eos_ids=self._eos_ids, device=self._device
        )
        output = record.params.structured_outputs
        if output is not None and self._grammars is None:
            sequence.refuse("the model has no tokenizer")
        elif output is not None and self._grammars is not None:
            try:
                sequence.follow(self._grammars().matcher(output))
            except (GrammarError, Invalid) as error:
                sequence.refuse(str(error))
        sequence.extend(record.ids[record.num_prompt :])
        return sequence

    def sample(
        self,
        logits: Tensor,
        sequences: Sequence[SampledSequence],
        drafts: Sequence[tuple[int, ...]] | None = None,
    ) -> Sample:
        """Samples a token of each sequence, and one more after each of its drafts that is the token
        sampled before it.

        `logits`, [R, V] of any float dtype, hold for each sequence, in order, a row and one for
        each of its drafts. None: no sequence has drafts.
        """
        drafts = [()] * len(sequences) if drafts is None else drafts
        assert logits.shape == (len(sequences) + sum(map(len, drafts)), self._vocab_size), (
            logits.shape
        )
        if not sequences:
            return Sample((), (), ())
        rows = logits.float()
        # Of each sequence its rows, of all sequences one after the other.
        starts = [*accumulate((1 + len(guesses) for guesses in drafts), initial=0)]
        for sequence, start in zip(sequences, starts, strict=False) if failpoints.ARMED else ():
            if is_struck(Point.NAN_LOGITS, "nan", seed=sequence.seed):
                rows[start].fill_(math.nan)
        best = first_largest(rows)
        peaks = (
            rows.gather(1, torch.tensor(best, device=rows.device).unsqueeze(1)).squeeze(1).tolist()
        )
        # A NaN counts as the largest, so the peak alone tells whether the row is a distribution.
        best = [
            token if math.isfinite(peak) else NO_TOKEN
            for token, peak in zip(best, peaks, strict=True)
        ]
        each_row = rows.unbind()
        drawn = (
            [NONE_DRAWN] * len(rows)
            if self._draws is None
            else draw_ahead(self._draws, rows, best, sequences, starts)
        )
        runs = [
            self._run(each_row[start:end], best[start:end], sequence, guesses, drawn[start:end])
            for sequence, guesses, (start, end) in zip(
                sequences, drafts, pairwise(starts), strict=True
            )
        ]
        forced = tuple(
            sequence.forced_after(run.tokens[-1]) if run.is_good else ()
            for sequence, run in zip(sequences, runs, strict=True)
        )
        return Sample(
            tokens=tuple(run.tokens for run in runs),
            logprobs=_logprobs(sequences, runs),
            bad=tuple(
                sequence.seq
                for sequence, run in zip(sequences, runs, strict=True)
                if not run.is_good
            ),
            refused=tuple((one.seq, one.refusal) for one in sequences if one.refusal),
            forced=forced if any(forced) else (),
        )

    def _run(
        self,
        rows: Sequence[Tensor],
        best: list[int],
        sequence: SampledSequence,
        drafts: tuple[int, ...],
        drawn: list[int],
    ) -> _Run:
        """Samples from row to row, as long as the token sampled is the one that the next row was
        computed with."""
        tokens: list[int] = []
        for row, greedy, draft, ready in zip(rows, best, (*drafts, None), drawn, strict=True):
            token = greedy
            if token != NO_TOKEN and sequence.labels:
                token = _likeliest(row, sequence.labels)
            elif ready != NONE_DRAWN:
                token = _taken(ready, sequence)
            elif token != NO_TOKEN and not _is_plain_greedy(sequence):
                token = self._choose(row, sequence, greedy)
            if token == NO_TOKEN:
                return _Run(rows, (*tokens, 0), is_good=False)
            tokens.append(token)
            if token != draft or sequence.ends_with(token):
                break
            sequence.extend((token,))
        return _Run(rows, tuple(tokens), is_good=True)

    def _choose(self, row: Tensor, sequence: SampledSequence, greedy: int) -> int:
        params = sequence.params
        first = 0
        if sequence.is_held_by_grammar_alone and (params.temperature == 0 or _is_unlimited(params)):
            # A token that the grammar allows needs no mask. One that it does not allow is rejected:
            # those drawn after it, of the masked row, have the distribution that all of them have.
            token = greedy if params.temperature == 0 else self._draw(row, sequence)
            if sequence.allows(token):
                return token
            first = 1
        if sequence.is_adjusted:
            row = sequence.adjusted(row)
            # A small divisor overflows, and a mask may leave nothing: this sequence fails, and no
            # other.
            peak = float(row.max())
            if peak == -math.inf:
                sequence.refuse_all_tokens()
            if not math.isfinite(peak):
                return NO_TOKEN
        if params.temperature == 0:
            return first_largest(row.unsqueeze(0))[0]
        return self._draw(row, sequence, first)

    def _draw(self, row: Tensor, sequence: SampledSequence, first: int = 0) -> int:
        """Draws a token of the logits [V], limited by `top_k`, `top_p` and `min_p`, by rejection
        sampling.

        The limits keep the `top_k` best tokens (and all that tie with the last), of these the
        smallest set of the best that holds `top_p` of the mass, of these the ones with at least
        `min_p` of the best one's probability.

        Nothing is sorted: a token is proposed by inverse CDF, and rejected if the tokens with more
        weight alone hold `top_p`. Only those stay for the next proposal, so an accepted token has
        exactly the limited distribution, and few proposals are needed. `first` is the number of
        the first proposal.
        """
        params = sequence.params
        weights = self._weigh(row, params.temperature)
        if 0 < params.top_k < self._vocab_size:
            weights = _at_least(_kth_largest(weights, params.top_k), weights)
        tiles = _tile_sums(weights)
        nucleus = tiles[-1] * params.top_p
        if params.min_p > 0:
            weights = _at_least(params.min_p, weights)
            tiles = _tile_sums(weights)
        for proposal in count(first):
            token, weight = _pick(weights, tiles, uniform(sequence.seed, sequence.index, proposal))
            if params.top_p >= 1.0:
                break
            heavier = functional.threshold(weights, weight, 0.0)
            tiles = _tile_sums(heavier)
            if tiles[-1] < nucleus:
                break
            weights = heavier
        return token

    def _weigh(self, row: Tensor, temperature: float) -> Tensor:
        """Returns the probabilities relative to the best one's, float32 [P], zeros past the
        vocabulary."""
        scale = LOG2_E / max(temperature, LEAST_TEMPERATURE)
        torch.exp2((row - row.max()).mul_(scale), out=self._weights[: self._vocab_size])
        return self._weights


def first_largest(rows: Tensor) -> list[int]:
    """Returns the index of the largest value of each row of [R, V], float32: the first of equals, a
    NaN before all."""
    if rows.device.type == "cpu":
        # numpy's argmax is five times as fast as torch's, with the same answer.
        return [int(index) for index in rows.numpy().argmax(axis=1)]
    return [int(index) for index in rows.argmax(dim=1).tolist()]


def _likeliest(row: Tensor, labels: list[int]) -> int:
    """Returns the label with the largest logit of [V]; the first of equals. No finite one: no
    token."""
    logits = row[labels]
    best = first_largest(logits.unsqueeze(0))[0]
    return labels[best] if math.isfinite(float(logits[best])) else NO_TOKEN


def _taken(drawn: int, sequence: SampledSequence) -> int:
    """The token that was drawn, NO_TOKEN if the row is no distribution."""
    if drawn == NONE_LEFT:
        sequence.refuse_all_tokens()
    return NO_TOKEN if drawn in {NONE_LEFT, NOT_FINITE} else drawn


def _is_plain_greedy(sequence: SampledSequence) -> bool:
    return sequence.params.temperature == 0 and not sequence.is_adjusted


def _is_unlimited(params: SamplingParams) -> bool:
    """Whether a token is drawn of all that have any probability."""
    return params.top_k <= 0 and params.top_p >= 1.0 and params.min_p <= 0


def _at_least(least: float, weights: Tensor) -> Tensor:
    """Sets weights below `least` to 0.

    torch's `threshold` keeps only what is greater than its bound, hence the next float32 below
    `least`. A mask would be many times slower.
    """
    return functional.threshold(
        weights, float(np.nextafter(np.float32(least), np.float32(-1.0))), 0.0
    )


def _kth_largest(weights: Tensor, k: int) -> float:
    """The k-th largest weight. Values below the k-th best tile's maximum are not among the k
    largest: few remain."""
    best = weights.view(-1, TILE).amax(1)
    if k > len(best) or weights.device.type != "cpu":
        return float(weights.topk(k).values[-1])
    values = weights.numpy()
    candidates = values[values >= float(best.topk(k).values[-1])]
    return float(np.partition(candidates, -k)[-k])


def _tile_sums(weights: Tensor) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The running sum of the tiles' weights, float64 [P / TILE]."""
    return weights.view(-1, TILE).sum(1).numpy(force=True).cumsum(dtype=np.float64)


def _pick(
    weights: Tensor, tiles: np.ndarray[tuple[int], np.dtype[np.float64]], u: float
) -> tuple[int, float]:
    """Returns the token at `u` of the cumulative distribution, and its weight."""
    tile = _find(tiles, u * tiles[-1])
    inside = weights[tile * TILE : (tile + 1) * TILE].numpy(force=True)
    before = tiles[tile - 1] if tile else 0.0
    offset = _find(inside.cumsum(dtype=np.float64), u * tiles[-1] - before)
    return tile * TILE + offset, float(inside[offset])


def _find(sums: np.ndarray[tuple[int], np.dtype[np.float64]], target: float) -> int:
    """Returns the first index with a running sum above the target; rounding never leads past the
    last positive weight."""
    return int(sums.searchsorted(min(target, np.nextafter(sums[-1], 0.0)), side="right"))


def _logprobs(
    sequences: Sequence[SampledSequence], runs: Sequence[_Run]
) -> tuple[tuple[TokenLogprob | None, ...], ...]:
    if all(sequence.params.logprobs is None for sequence in sequences):
        return ()
    return tuple(
        _logprobs_of(run, sequence.params.logprobs, sequence.labels)
        for sequence, run in zip(sequences, runs, strict=True)
    )


def _logprobs_of(
    run: _Run, num_top: int | None, labels: list[int]
) -> tuple[TokenLogprob | None, ...]:
    """One for each token; None where none was asked for, and for a bad row's."""
    if num_top is None:
        return (None,) * len(run.tokens)
    good = run.tokens if run.is_good else run.tokens[:-1]
    found = tuple(
        _logprob(row, token, num_top, labels) for row, token in zip(run.rows, good, strict=False)
    )
    return found if run.is_good else (*found, None)


def _logprob(row: Tensor, token: int, num_top: int, labels: list[int]) -> TokenLogprob:
    """The log-probabilities of the model's own distribution: before temperature, penalties and
    limits. Labels stand in for the likeliest tokens, in their order."""
    logprobs = row.log_softmax(0)
    if labels:
        found = zip(labels, logprobs[labels].tolist(), strict=True)
        return TokenLogprob(token, float(logprobs[token]), tuple(found))
    values, ids = logprobs.topk(min(num_top, len(row)))
    return TokenLogprob(
        token, float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True))
    )
