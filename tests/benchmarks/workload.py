"""Workload W: prompts of 64 to 256 random tokens, 64 new tokens each, greedy, no early end."""

from __future__ import annotations

import random
from dataclasses import dataclass

from shardline.job import SamplingParams
from tests.benchmarks.model import VOCABULARY

NEW_TOKENS = 64
WARM_UP_PROMPTS = 16
"""Enough for every allocation and nearly all compiled products, before the clock starts."""
PARAMS = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts as token ids."""

    prompts: tuple[tuple[int, ...], ...]

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of the whole workload."""
        return len(self.prompts) * NEW_TOKENS


def workload(num_prompts: int = 64, seed: int = 7) -> Workload:
    """The same prompts in every run."""
    source = random.Random(seed)
    return Workload(
        tuple(
            tuple(source.randrange(3, VOCABULARY) for _ in range(source.randint(64, 256))) for _ in range(num_prompts)
        )
    )
