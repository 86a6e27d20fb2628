"""Workload W: prompts of 64 to 256 random tokens, 64 new tokens each, greedy, no early end. And
texts to copy."""

from __future__ import annotations

import random
from dataclasses import dataclass

from shardline.contract.job import SamplingParams
from tests.benchmarks.model import VOCABULARY

NEW_TOKENS = 64
WARM_UP_PROMPTS = 16
"""Enough for every allocation and nearly all compiled products, before the clock starts."""
CHANGED_EVERY = 16
COPIED_TOKENS = 160
PARAMS = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts as token ids."""

    prompts: tuple[tuple[int, ...], ...]

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of the whole workload."""
        return len(self.prompts) * NEW_TOKENS


def workload(num_prompts: int = 64, *, run: int = 0, num_common: int = 0) -> Workload:
    """The same prompts in every run but for their first token, so that no run finds the KV of
    another. All prompts of a run have `num_common` tokens before those of their own."""
    source = random.Random(7)
    common = random.Random(8)
    first = [3 + run, *(common.randrange(3, VOCABULARY) for _ in range(num_common))]
    own = [
        [source.randrange(3, VOCABULARY) for _ in range(source.randint(64, 256))]
        for _ in range(num_prompts)
    ]
    return Workload(tuple((*first, *ids[1:]) for ids in own))


def copying(num_prompts: int = 1, *, run: int = 0) -> Workload:
    """For the model that counts: each prompt holds the text that it will say, with one token of 16
    changed, as in a file that is said again with edits."""
    source = random.Random(9 + run)
    prompts = []
    for _ in range(num_prompts):
        first = source.randrange(3, VOCABULARY - COPIED_TOKENS)
        text = list(range(first, first + COPIED_TOKENS))
        for place in range(source.randrange(2, CHANGED_EVERY), len(text), CHANGED_EVERY):
            text[place] = source.randrange(3, VOCABULARY)
        prompts.append((3 + run, *text, first))
    return Workload(tuple(prompts))
