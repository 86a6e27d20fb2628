"""The sampler: logits to tokens, at the tail. A token depends on nothing but its own row, parameters, seed and history.

So that bits do not depend on the batch, only operations that are exact in any order (conversion, comparison, maximum)
run over all rows at once; whatever rounds runs row by row. Random numbers come from a keyed hash, one per drawn token,
the same on every device and in every version of torch. Knows no scheduler, no hop and no tokenizer.
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
"""Lower ones, 0 apart, draw as this one does: nothing but ties is left to chance, and no scale overflows."""


class Sample(NamedTuple):
    """What a StepResult needs. A bad row has token 0; `logprobs` is empty if nobody asked for them."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...]
    bad: tuple[int, ...]


class SampledSequence:
    """What the tail keeps of an open sequence. `extend` it by the ids of each of its rows before they are sampled."""

    __slots__ = ("_masked", "_penalties", "index", "params", "seed", "seq")

    def __init__(self, record: Open, *, vocab_size: int, eos_ids: frozenset[int], device: torch.device) -> None:
        params = record.params
        self.seq = record.seq
        self.seed = record.seed
        self.params = params
        self.index = 0
        """Output index of the token to be sampled next."""
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
        """More output tokens are known."""
        self.index += len(ids)
        if self._penalties is not None and ids:
            self._penalties.extend(ids)

    def adjusted(self, row: Tensor) -> Tensor:
        """The row with penalties, and with stop tokens masked until `min_tokens`. The caller's row stays as it is."""
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
        """Repetition multiplies where the logit is negative."""
        return row.clamp(min=0) / self._divisor + row.clamp(max=0) * self._divisor - self._shift


class Sampler:
    """One per tail, used by one thread: it keeps buffers."""

    def __init__(self, *, vocab_size: int, eos_ids: Iterable[int], device: torch.device | str = "cpu") -> None:
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._device = torch.device(device)
        self._weights = torch.zeros(round_up(vocab_size, TILE), device=self._device)

    def open(self, record: Open) -> SampledSequence:
        """The state of a sequence that appears, or is restored, in this epoch."""
        return SampledSequence(record, vocab_size=self._vocab_size, eos_ids=self._eos_ids, device=self._device)

    def sample(self, logits: Tensor, wants: Sequence[SampledSequence]) -> Sample:
        """One token for each row of `logits` [len(wants), vocab]."""
        assert logits.shape == (len(wants), self._vocab_size), logits.shape
        if not wants:
            return Sample((), (), ())
        rows = logits.float()
        if failpoints.ARMED is not None:
            _spoil(rows, wants)
        best = first_largest(rows)
        peaks = rows.gather(1, torch.tensor(best, device=rows.device).unsqueeze(1)).squeeze(1).tolist()
        # A NaN counts as the largest, so the peak alone tells whether the row is a distribution.
        is_good = [math.isfinite(peak) for peak in peaks]
        tokens = [
            0 if not good else greedy if _is_plain_greedy(want) else self._choose(row, want)
            for row, want, greedy, good in zip(rows, wants, best, is_good, strict=True)
        ]
        return Sample(
            tokens=tuple(tokens),
            logprobs=_logprobs(rows, wants, tokens, is_good),
            bad=tuple(want.seq for want, good in zip(wants, is_good, strict=True) if not good),
        )

    def _choose(self, row: Tensor, want: SampledSequence) -> int:
        row = want.adjusted(row)
        if want.params.temperature == 0:
            return first_largest(row.unsqueeze(0))[0]
        return self._draw(row, want)

    def _draw(self, row: Tensor, want: SampledSequence) -> int:
        """Keeps the `top_k` best (all that tie with the last), of them the smallest best set that holds `top_p` of the
        mass, of them those with at least `min_p` of the best one's probability; then draws.

        No sort: a token is drawn by inverse CDF and refused if the heavier ones alone hold `top_p`; then only heavier
        ones stay for the next draw, so the draw is exact and soon over.
        """
        params = want.params
        weights = self._weigh(row, params.temperature)
        if 0 < params.top_k < self._vocab_size:
            weights = _at_least(_kth_largest(weights, params.top_k), weights)
        tiles = _tile_sums(weights)
        nucleus = tiles[-1] * params.top_p
        if params.min_p > 0:
            weights = _at_least(params.min_p, weights)
            tiles = _tile_sums(weights)
        for attempt in count():
            token, weight = _pick(weights, tiles, uniform(want.seed, want.index, attempt))
            if params.top_p >= 1.0:
                break
            heavier = functional.threshold(weights, weight, 0.0)
            tiles = _tile_sums(heavier)
            if tiles[-1] < nucleus:
                break
            weights = heavier
        return token

    def _weigh(self, row: Tensor, temperature: float) -> Tensor:
        """Probabilities relative to the best one's, padded with zeros to whole tiles."""
        scale = LOG2_E / max(temperature, LEAST_TEMPERATURE)
        torch.exp2((row - row.max()).mul_(scale), out=self._weights[: self._vocab_size])
        return self._weights


def uniform(seed: int, index: int, attempt: int) -> float:
    """A number in [0, 1) for each key: 53 bits of BLAKE2b."""
    digest = hashlib.blake2b(struct.pack("<QQQ", seed, index, attempt), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def first_largest(rows: Tensor) -> list[int]:
    """Index of the largest value of each row, the first of equals; a NaN counts as the largest."""
    if rows.device.type == "cpu":
        # Five times as fast as torch's, with the same answer.
        return [int(index) for index in rows.numpy().argmax(axis=1)]
    return [int(index) for index in rows.argmax(dim=1).tolist()]


def _has_penalties(params: SamplingParams) -> bool:
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)


def _is_plain_greedy(want: SampledSequence) -> bool:
    return want.params.temperature == 0 and not want.is_adjusted


def _at_least(least: float, weights: Tensor) -> Tensor:
    """The weights from `least` up, else 0. `threshold` is many times as fast as a mask, but keeps what is above."""
    return functional.threshold(weights, float(np.nextafter(np.float32(least), np.float32(-1.0))), 0.0)


def _kth_largest(weights: Tensor, k: int) -> float:
    """What is below the k-th best tile's maximum is none of the k largest, which leaves few to sort."""
    best = weights.view(-1, TILE).amax(1)
    if k > len(best) or weights.device.type != "cpu":
        return float(weights.topk(k).values[-1])
    values = weights.numpy()
    candidates = values[values >= float(best.topk(k).values[-1])]
    return float(np.partition(candidates, -k)[-k])


def _tile_sums(weights: Tensor) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Running sum of the tiles' weights."""
    return weights.view(-1, TILE).sum(1).numpy(force=True).cumsum(dtype=np.float64)


def _pick(weights: Tensor, tiles: np.ndarray[tuple[int], np.dtype[np.float64]], u: float) -> tuple[int, float]:
    """The token at `u` of the cumulative distribution, and its weight."""
    tile = _find(tiles, u * tiles[-1])
    inside = weights[tile * TILE : (tile + 1) * TILE].numpy(force=True)
    before = tiles[tile - 1] if tile else 0.0
    place = _find(inside.cumsum(dtype=np.float64), u * tiles[-1] - before)
    return tile * TILE + place, float(inside[place])


def _find(sums: np.ndarray[tuple[int], np.dtype[np.float64]], target: float) -> int:
    """The first place whose running sum is above the target; rounding never leads past the last positive weight."""
    return int(sums.searchsorted(min(target, np.nextafter(sums[-1], 0.0)), side="right"))


def _spoil(rows: Tensor, wants: Sequence[SampledSequence]) -> None:
    for row, want in zip(rows, wants, strict=True):
        if is_struck(Point.NAN_LOGITS, "nan", seed=want.seed):
            row.fill_(math.nan)


def _logprobs(
    rows: Tensor, wants: Sequence[SampledSequence], tokens: list[int], is_good: list[bool]
) -> tuple[TokenLogprob | None, ...]:
    if all(want.params.logprobs is None for want in wants):
        return ()
    return tuple(
        _logprob(row, token, want.params.logprobs) if good and want.params.logprobs is not None else None
        for row, want, token, good in zip(rows, wants, tokens, is_good, strict=True)
    )


def _logprob(row: Tensor, token: int, num_top: int) -> TokenLogprob:
    """Of the model's own distribution: before temperature, penalties and limits."""
    logprobs = row.log_softmax(0)
    values, ids = logprobs.topk(min(num_top, len(row)))
    return TokenLogprob(token, float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
