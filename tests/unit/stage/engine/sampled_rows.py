"""Rows of logits, and the sequences that a sampler draws from them. No test."""

from __future__ import annotations

import torch
from torch import Tensor

from services.stage.sampling.sampled_sequence import SampledSequence
from services.stage.sampling.sampler import Sampler
from shardline.contract.job import SamplingParams
from shardline_scheduler.step_plan import Open

VOCAB = 1003
"""No multiple of a tile."""

EOS = 7
GREEDY = SamplingParams(temperature=0.0)


def sampler(vocab: int = VOCAB) -> Sampler:
    """One whose only end is EOS."""
    return Sampler(vocab_size=vocab, eos_ids=[EOS])


def sequence(
    params: SamplingParams,
    *,
    seed: int = 1,
    outputs: tuple[int, ...] = (),
    vocab: int = VOCAB,
    number: int = 0,
) -> SampledSequence:
    """A sequence of four tokens and its outputs."""
    prompt = (1, 2, 3, 4)
    return sampler(vocab).open(Open(number, (*prompt, *outputs), len(prompt), params, seed, 4))


def logits(
    num_rows: int, *, dtype: torch.dtype = torch.float32, vocab: int = VOCAB, scale: float = 2.0
) -> Tensor:
    """Random ones in float32 or `dtype`: [num_rows, vocab]; equal numbers of rows are equal."""
    generator = torch.Generator().manual_seed(num_rows)
    return (torch.randn(num_rows, vocab, generator=generator) * scale).to(dtype)
