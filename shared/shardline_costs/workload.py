"""The load that a plan is made for, and the steps that the scheduler would cut from it. Knows no
device.

As the scheduler does: a step has the decodes of one lane, then prompt rows up to the token budget;
a pipeline has as many lanes as stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

TOKEN_BUDGET = 256
"""Rows of a step, as stages have it by default."""
PARTS = 4
"""A number that grows or falls evenly stands for this many steps of different size: costs are not
linear in rows."""


class Goal(StrEnum):
    """What is made as small as can be."""

    THROUGHPUT = "throughput"
    """The slowest stage."""
    LATENCY = "latency"
    """The sum of all stages, for one request alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKind:
    """Steps of one size."""

    count: float
    decodes: float
    """Rows that decode one token each; all of them are sampled."""
    decode_context: float
    """Tokens that these rows attend to, added up."""
    prefill: float = 0.0
    """Prompt rows."""
    prefill_context: float = 0.0

    @property
    def rows(self) -> float:
        """Packed rows."""
        return self.decodes + self.prefill


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests of one size, `concurrency` at a time, in tokens."""

    prompt: int = 512
    output: int = 128
    concurrency: int = 64
    token_budget: int = TOKEN_BUDGET
    at_once: bool = False
    """Whether `concurrency` requests come together and none after them, as in a benchmark; else
    there is always one more."""

    @property
    def kv_tokens(self) -> int:
        """Counts the tokens of which every stage holds keys and values."""
        return self.concurrency * (self.prompt + self.output)

    def steps(self, num_lanes: int) -> list[StepKind]:
        """The steps in which `concurrency` requests are computed from the first prompt row to the
        last token."""
        if not self.at_once:
            return [self._steady(self.concurrency * self.output, num_lanes)]
        num_prefill = self._num_prefill(num_lanes)
        if num_prefill < self._num_decode(num_lanes):
            return list(self._all_together(num_lanes, num_prefill))
        return list(self._one_after_the_other(num_lanes))

    def alone(self) -> list[StepKind]:
        """The steps of one request that has the pipeline for itself."""
        return [*self.first_token(), self._step(self.output - 1, 1.0)]

    def first_token(self) -> list[StepKind]:
        """The prompt's chunks."""
        size = min(self.prompt, self.token_budget)
        num = self.prompt / size
        return [
            StepKind(
                count=num,
                decodes=0,
                decode_context=0,
                prefill=size,
                prefill_context=size * self.prompt / 2,
            )
        ]

    def _num_decode(self, num_lanes: int) -> int:
        """Steps from a request's first token to its last: each lane comes round once in
        `num_lanes`."""
        return num_lanes * (self.output - 1)

    def _num_prefill(self, num_lanes: int) -> float:
        """Steps until the last prompt is computed, if no request ends before: decodes grow evenly
        to all requests."""
        decodes = min(self.concurrency / (2 * num_lanes), self.token_budget / 2)
        return self.concurrency * self.prompt / (self.token_budget - decodes)

    def _all_together(self, num_lanes: int, num_prefill: float) -> Iterator[StepKind]:
        """Prompts, then decodes of all, then fewer and fewer: the first to begin ends first."""
        full = self.concurrency / num_lanes
        for decodes in _evenly(min(full, self.token_budget)):
            yield self._step(num_prefill / PARTS, decodes, self.token_budget - decodes)
            yield self._step(num_prefill / PARTS, decodes)
        yield self._step(self._num_decode(num_lanes) - num_prefill, full)

    def _one_after_the_other(self, num_lanes: int) -> Iterator[StepKind]:
        """The first requests end before the last ones begin: decodes grow, stay, and fall when no
        prompt is left."""
        num_ramp = self._num_decode(num_lanes)
        steady = self._steady(1, num_lanes)
        ramp = [*_evenly(steady.decodes)]
        for decodes in ramp:
            yield self._step(num_ramp / PARTS, decodes, self.token_budget - decodes)
            yield self._step(num_ramp / PARTS, decodes)
        left = self.concurrency * self.prompt - num_ramp * (self.token_budget - steady.decodes / 2)
        yield self._step(max(0.0, left) / steady.prefill, steady.decodes, steady.prefill)

    def _steady(self, num_tokens: int, num_lanes: int) -> StepKind:
        """Returns steps that give `num_tokens` tokens, while every request that ends makes room for
        the prompt of the next."""
        per_token = self.prompt / self.output
        decodes = min(self.concurrency / num_lanes, self.token_budget / (1 + per_token))
        return self._step(num_tokens / decodes, decodes, decodes * per_token)

    def _step(self, count: float, decodes: float, prefill: float = 0.0) -> StepKind:
        decode_context = decodes * (self.prompt + self.output / 2)
        return StepKind(
            count=count,
            decodes=decodes,
            decode_context=decode_context,
            prefill=prefill,
            prefill_context=prefill * self.prompt / 2,
        )


def _evenly(most: float) -> list[float]:
    """PARTS numbers that stand for all from 0 to the most."""
    return [most * (part + 0.5) / PARTS for part in range(PARTS)]
