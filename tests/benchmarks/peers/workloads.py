"""What every engine is asked: token ids, output tokens, arrivals. Knows no engine."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.benchmarks.model import VOCABULARY
from tests.benchmarks.workload import NEW_TOKENS, workload

RATES = (1.0, 2.0, 3.0)
"""Arrivals/s of the open-loop traces."""
TRACE_RUNS = 2_000
"""Runs of one trace's prompts, more than any workload has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One run's requests. `arrivals_s` counts from the start."""

    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int
    arrivals_s: tuple[float, ...]

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all requests."""
        return len(self.prompts) * self.new_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(map(len, self.prompts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A workload, for any run. `lengths` bound a prompt's own tokens; `rate` is arrivals/s of a
    Poisson process with so many arrivals in all, 0 for all at once."""

    name: str
    title: str
    num_prompts: int
    lengths: tuple[int, int]
    new_tokens: int = NEW_TOKENS
    num_common: int = 0
    rate: float = 0.0
    first_run: int = 0
    """Added to a run's number, so that no prompt is that of another workload."""

    def work(self, run: int) -> Work:
        """The same prompts in every run but for their first token, so that no run finds the KV of
        another."""
        prompts = self._prompts(run)
        span_s = self.num_prompts / self.rate if self.rate else 0.0
        clock = random.Random(9)
        arrivals_s = sorted(clock.uniform(0.0, span_s) for _ in prompts)
        return Work(prompts=prompts, new_tokens=self.new_tokens, arrivals_s=tuple(arrivals_s))

    def _prompts(self, run: int) -> tuple[tuple[int, ...], ...]:
        if self.lengths == (64, 256):
            return workload(
                self.num_prompts, run=self.first_run + run, num_common=self.num_common
            ).prompts
        # by name: a prompt must not begin as one of another workload does
        source = random.Random(self.name)
        own = [
            [source.randrange(3, VOCABULARY) for _ in range(source.randint(*self.lengths))]
            for _ in range(self.num_prompts)
        ]
        return tuple((3 + run, *ids[1:]) for ids in own)


def shapes(*, quick: bool = False) -> dict[str, Shape]:
    """All workloads by name. Quick ones are an eighth as many requests: enough to see that an
    engine runs."""
    part = 8 if quick else 1
    all_at_once = (
        Shape(
            name="W",
            title="64 prompts of 64-256 tokens, 64 out",
            num_prompts=64 // part,
            lengths=(64, 256),
        ),
        Shape(
            name="long",
            title="8 prompts of 1,500 tokens, 64 out",
            num_prompts=8 // part,
            lengths=(1500, 1500),
        ),
        Shape(
            name="short",
            title="512 prompts of 32 tokens, 16 out",
            num_prompts=512 // part,
            lengths=(32, 32),
            new_tokens=16,
        ),
        Shape(
            name="common",
            title="64 prompts with a common head of 512 tokens and 64-256 of their own, 64 out",
            num_prompts=64 // part,
            lengths=(64, 256),
            num_common=512,
        ),
        Shape(
            name="alone",
            title="one request of 128 tokens, 64 out",
            num_prompts=1,
            lengths=(128, 128),
        ),
    )
    traces = (
        Shape(
            name=f"poisson-{rate:g}",
            title=f"arrivals at {rate:g}/s, 64-256 tokens, 64 out",
            num_prompts=32 // part,
            lengths=(64, 256),
            rate=rate,
            first_run=TRACE_RUNS * (1 + number),
        )
        for number, rate in enumerate(RATES)
    )
    return {shape.name: shape for shape in (*all_at_once, *traces)}
