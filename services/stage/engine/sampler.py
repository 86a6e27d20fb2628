"""The sampler: logits to tokens, at the tail. A token depends on nothing but its own row, parameters, seed and history.

So that bits do not depend on other rows, only operations that are exact in any order (conversion, comparison, maximum)
run over all rows at once; operations that round run row by row. Random numbers come from a keyed hash, one per proposed
token, the same on every device and in every version of torch. Knows no scheduler, no hop and no tokenizer.

Letters of shapes: R sampled rows, V the vocabulary, P the vocabulary padded to whole tiles.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from services.stage.scheduling.step_plan import Open
from shardline import failpoints
from shardline.failpoints import Point, is_struck
from shardline.job import SamplingParams, TokenLogprob
from shardline.rounding import round_up

TILE = 128
"""Weights are summed by tiles, then tiles one by one in float64: ten times faster than a running sum, and ordered."""

LOG2_E = math.log2(math.e)
LEAST_TEMPERATURE = 1e-5
"""Lower temperatures, except 0, draw as this one does: only ties are left to chance, and no scale overflows."""


class Sample(NamedTuple):
    """The sampled tokens, as a StepResult needs them. A bad row has token 0; `logprobs` is empty if no row needs them.

    `bad` names the sequences whose logits were not finite.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...]
    bad: tuple[int, ...]


class SampledSequence:
    """What the tail keeps of an open sequence. `extend` it with the ids of each row before that row is sampled."""

    __slots__ = ("_masked", "_penalties", "index", "params", "seed", "seq")

    def __init__(self, record: Open, *, vocab_size: int, eos_ids: frozenset[int], device: torch.device) -> None:
        params = record.params
        self.seq = record.seq
        self.seed = record.seed
        self.params = params
        self.index = 0
        """The output index of the token that is sampled next."""
        self._masked: list[int] = []
        if params.min_tokens > 0:
            self._masked = [token for token in params.stop_ids(eos_ids) if token < vocab_size]
        self._penalties: _Penalties | None = None
        if _has_penalties(params):
            self._penalties = _Penalties(
                params, record.ids[: record.num_prompt], torch.zeros(vocab_size, device=device)
            )
        self.extend(record.ids[record.num_prompt :])

    @property
    def is_adjusted(self) -> bool:
        """Whether logits change before a token is chosen."""
        return self._penalties is not None or self._is_masked

    @property
    def _is_masked(self) -> bool:
        return self.index < self.params.min_tokens and bool(self._masked)

    def extend(self, ids: Sequence[int]) -> None:
        """Adds output tokens to the history."""
        self.index += len(ids)
        if self._penalties is not None and ids:
            self._penalties.extend(ids)

    def adjusted(self, row: Tensor) -> Tensor:
        """Returns the logits [V], float32, with penalties, and with stop tokens masked until `min_tokens`.

        The given row is not changed.
        """
        if self._penalties is not None:
            row = self._penalties.applied(row)
        if self._is_masked:
            row = row.clone()
            row[self._masked] = -math.inf
        return row


class _Penalties:
    """Two vectors over the vocabulary: what a token's logit is divided by, and what is taken off it."""

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
            self._shift[token] = params.presence_penalty + params.frequency_penalty * self._counts[token]

    def applied(self, row: Tensor) -> Tensor:
        """Returns the logits [V], float32, with penalties. Repetition divides positive logits and multiplies others."""
        return row.clamp(min=0) / self._divisor + row.clamp(max=0) * self._divisor - self._shift


class Sampler:
    """Samples tokens on a tail. Used by one thread: it keeps a buffer."""

    def __init__(self, *, vocab_size: int, eos_ids: Iterable[int], device: torch.device | str = "cpu") -> None:
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._device = torch.device(device)
        self._weights = torch.zeros(round_up(vocab_size, TILE), device=self._device)

    def open(self, record: Open) -> SampledSequence:
        """Returns the state of a sequence that is opened, or restored, in this epoch."""
        return SampledSequence(record, vocab_size=self._vocab_size, eos_ids=self._eos_ids, device=self._device)

    def sample(self, logits: Tensor, sequences: Sequence[SampledSequence]) -> Sample:
        """Samples one token for each row of `logits`, [R, V] of any float dtype; row i belongs to the i-th sequence."""
        assert logits.shape == (len(sequences), self._vocab_size), logits.shape
        if not sequences:
            return Sample((), (), ())
        rows = logits.float()
        if failpoints.ARMED is not None:
            _spoil(rows, sequences)
        best = first_largest(rows)
        peaks = rows.gather(1, torch.tensor(best, device=rows.device).unsqueeze(1)).squeeze(1).tolist()
        # A NaN counts as the largest, so the peak alone tells whether the row is a distribution.
        is_good = [math.isfinite(peak) for peak in peaks]
        tokens = [
            0 if not good else greedy if _is_plain_greedy(sequence) else self._choose(row, sequence)
            for row, sequence, greedy, good in zip(rows, sequences, best, is_good, strict=True)
        ]
        return Sample(
            tokens=tuple(tokens),
            logprobs=_logprobs(rows, sequences, tokens, is_good),
            bad=tuple(sequence.seq for sequence, good in zip(sequences, is_good, strict=True) if not good),
        )

    def _choose(self, row: Tensor, sequence: SampledSequence) -> int:
        row = sequence.adjusted(row)
        if sequence.params.temperature == 0:
            return first_largest(row.unsqueeze(0))[0]
        return self._draw(row, sequence)

    def _draw(self, row: Tensor, sequence: SampledSequence) -> int:
        """Draws a token of the logits [V], limited by `top_k`, `top_p` and `min_p`, by rejection sampling.

        The limits keep the `top_k` best tokens (and all that tie with the last), of these the smallest set of the best
        that holds `top_p` of the mass, of these the ones with at least `min_p` of the best one's probability.

        Nothing is sorted: a token is proposed by inverse CDF, and rejected if the tokens with more weight alone hold
        `top_p`. Only those stay for the next proposal, so an accepted token has exactly the limited distribution, and
        few proposals are needed.
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
        for proposal in count():
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
        """Returns the probabilities relative to the best one's, float32 [P], zeros past the vocabulary."""
        scale = LOG2_E / max(temperature, LEAST_TEMPERATURE)
        torch.exp2((row - row.max()).mul_(scale), out=self._weights[: self._vocab_size])
        return self._weights


def uniform(seed: int, index: int, proposal: int) -> float:
    """Returns a number in [0, 1) that is a function of its key: 53 bits of BLAKE2b."""
    digest = hashlib.blake2b(struct.pack("<QQQ", seed, index, proposal), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def first_largest(rows: Tensor) -> list[int]:
    """Returns the index of the largest value of each row of [R, V], float32: the first of equals, a NaN before all."""
    if rows.device.type == "cpu":
        # numpy's argmax is five times as fast as torch's, with the same answer.
        return [int(index) for index in rows.numpy().argmax(axis=1)]
    return [int(index) for index in rows.argmax(dim=1).tolist()]


def _has_penalties(params: SamplingParams) -> bool:
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)


def _is_plain_greedy(sequence: SampledSequence) -> bool:
    return sequence.params.temperature == 0 and not sequence.is_adjusted


def _at_least(least: float, weights: Tensor) -> Tensor:
    """Sets weights below `least` to 0.

    torch's `threshold` keeps only what is greater than its bound, hence the next float32 below `least`. A mask would be
    many times slower.
    """
    return functional.threshold(weights, float(np.nextafter(np.float32(least), np.float32(-1.0))), 0.0)


def _kth_largest(weights: Tensor, k: int) -> float:
    """The k-th largest weight. Values below the k-th best tile's maximum are not among the k largest: few remain."""
    best = weights.view(-1, TILE).amax(1)
    if k > len(best) or weights.device.type != "cpu":
        return float(weights.topk(k).values[-1])
    values = weights.numpy()
    candidates = values[values >= float(best.topk(k).values[-1])]
    return float(np.partition(candidates, -k)[-k])


def _tile_sums(weights: Tensor) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The running sum of the tiles' weights, float64 [P / TILE]."""
    return weights.view(-1, TILE).sum(1).numpy(force=True).cumsum(dtype=np.float64)


def _pick(weights: Tensor, tiles: np.ndarray[tuple[int], np.dtype[np.float64]], u: float) -> tuple[int, float]:
    """Returns the token at `u` of the cumulative distribution, and its weight."""
    tile = _find(tiles, u * tiles[-1])
    inside = weights[tile * TILE : (tile + 1) * TILE].numpy(force=True)
    before = tiles[tile - 1] if tile else 0.0
    offset = _find(inside.cumsum(dtype=np.float64), u * tiles[-1] - before)
    return tile * TILE + offset, float(inside[offset])


def _find(sums: np.ndarray[tuple[int], np.dtype[np.float64]], target: float) -> int:
    """The first index whose running sum is above the target; rounding never leads past the last positive weight."""
    return int(sums.searchsorted(min(target, np.nextafter(sums[-1], 0.0)), side="right"))


def _spoil(rows: Tensor, sequences: Sequence[SampledSequence]) -> None:
    for row, sequence in zip(rows, sequences, strict=True):
        if is_struck(Point.NAN_LOGITS, "nan", seed=sequence.seed):
            row.fill_(math.nan)


def _logprobs(
    rows: Tensor, sequences: Sequence[SampledSequence], tokens: list[int], is_good: list[bool]
) -> tuple[TokenLogprob | None, ...]:
    if all(sequence.params.logprobs is None for sequence in sequences):
        return ()
    return tuple(
        _logprob(row, token, sequence.params.logprobs) if good and sequence.params.logprobs is not None else None
        for row, sequence, token, good in zip(rows, sequences, tokens, is_good, strict=True)
    )


def _logprob(row: Tensor, token: int, num_top: int) -> TokenLogprob:
    """The log-probabilities of the model's own distribution: before temperature, penalties and limits."""
    logprobs = row.log_softmax(0)
    values, ids = logprobs.topk(min(num_top, len(row)))
    return TokenLogprob(token, float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
