"""What a run's tokens and times say: rates, waits, gaps, and how far two engines agree. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from statistics import median

from tests.benchmarks.peers.workloads import Work

FIRST_TOKENS = 4
"""Of each answer, for the share that agrees: later tokens follow from a first difference, however
small its cause."""


class Unfair(Exception):
    """An engine that did not do what was asked: its time stands for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One run: per request, its tokens and the time of each, in seconds after the start."""

    work: Work
    ids: tuple[tuple[int, ...], ...]
    times_s: tuple[tuple[float, ...], ...]

    @classmethod
    def of(
        cls, work: Work, ids: Sequence[Sequence[int]], times_s: Sequence[Sequence[float]]
    ) -> Served:
        """Raises Unfair unless every request got exactly its number of tokens."""
        numbers = {len(each) for each in ids} | {len(each) for each in times_s}
        if len(ids) != len(work.prompts) or numbers != {work.new_tokens}:
            raise Unfair(
                f"{work.new_tokens} tokens were asked for each prompt,"
                f" and the answers have {sorted(numbers)}"
            )
        return cls(work=work, ids=tuple(map(tuple, ids)), times_s=tuple(map(tuple, times_s)))

    @property
    def wall_s(self) -> float:
        """To the last token."""
        return max(times[-1] for times in self.times_s)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens."""
        return self.work.num_output_tokens / self.wall_s

    @property
    def waits_s(self) -> list[float]:
        """From arrival to first token, for each request."""
        return [
            times[0] - arrival
            for times, arrival in zip(self.times_s, self.work.arrivals_s, strict=True)
        ]

    @property
    def gaps_s(self) -> list[float]:
        """Between neighboring tokens of a request, all requests together."""
        return list(
            chain.from_iterable(
                (after - before for before, after in pairwise(each)) for each in self.times_s
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One run in numbers, ms but for the rate."""

    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float

    @classmethod
    def of(cls, served: Served) -> Figures:
        """Of one run."""
        waits = served.waits_s
        gaps = served.gaps_s
        return cls(
            tokens_per_s=round(served.tokens_per_s, 1),
            ttft_p50_ms=_ms(quantile(waits, 0.5)),
            ttft_p99_ms=_ms(quantile(waits, 0.99)),
            itl_p50_ms=_ms(quantile(gaps, 0.5)),
            itl_p99_ms=_ms(quantile(gaps, 0.99)),
        )

    @classmethod
    def median(cls, runs: Sequence[Figures]) -> Figures:
        """Field by field."""
        return cls(**{name: median(getattr(run, name) for run in runs) for name in cls.__slots__})


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def agreement(ours: Served, theirs: Served) -> float:
    """Share of prompts whose first tokens are the same."""
    pairs = list(zip(ours.ids, theirs.ids, strict=True))
    return sum(one[:FIRST_TOKENS] == other[:FIRST_TOKENS] for one, other in pairs) / len(pairs)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 2)
