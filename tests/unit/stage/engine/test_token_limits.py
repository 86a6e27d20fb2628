"""Bias, allowed ids and bad words at the sampler, against the rules said plainly, and with all
else that changes logits."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from services.stage.sampling.sampled_sequence import SampledSequence
from services.stage.sampling.sampler import Sampler
from shardline.contract.job import SamplingParams
from shardline.contract.structured_output import StructuredOutput
from shardline_scheduler.step_plan import Open
from tests.unit.stage.engine.sampled_rows import EOS, GREEDY, logits, sequence
from tests.unit.stage.engine.test_structured_output import Model
from tests.unit.tokenize.small_tokenizers import id_of

V = 30
PROMPT = (1, 2, 3, 4)
NUM_TOKENS = 24

Banned = tuple[tuple[int, ...], ...]


def row_after(ids: Sequence[int]) -> Tensor:
    """Logits that are a function of the tokens before."""
    generator = torch.Generator().manual_seed(hash((*ids[-2:], len(ids))) % 2**31)
    return torch.randn(V, generator=generator) * 3


def opened(
    params: SamplingParams, banned: Banned = (), outputs: Sequence[int] = ()
) -> tuple[Sampler, SampledSequence]:
    sampler = Sampler(vocab_size=V, eos_ids=[EOS])
    record = Open(0, (*PROMPT, *outputs), len(PROMPT), params, 11, 4, banned=banned)
    return sampler, sampler.open(record)


def completed(
    params: SamplingParams, banned: Banned = (), outputs: Sequence[int] = ()
) -> tuple[int, ...]:
    sampler, one = opened(params, banned, outputs)
    found = tuple(outputs)
    while len(found) < NUM_TOKENS:
        sample = sampler.sample(row_after(found).unsqueeze(0), [one])
        assert not sample.bad
        found += sample.tokens[0]
        one.extend(sample.tokens[0])
    return found


def by_the_rules(
    row: Tensor, params: SamplingParams, banned: Banned, outputs: Sequence[int]
) -> list[float]:
    """Each token's logit, one by one."""
    found: list[float] = []
    for token, logit in enumerate(row.tolist()):
        value = logit + params.logit_bias.get(token, 0.0)
        if token in (*PROMPT, *outputs):
            penalty = params.repetition_penalty
            value = value / penalty if value > 0 else value * penalty
        count = list(outputs).count(token)
        value -= params.presence_penalty * (count > 0) + params.frequency_penalty * count
        history = [*outputs, token]
        is_banned = any(tuple(history[-len(ids) :]) == ids for ids in banned)
        allowed = params.allowed_token_ids
        is_early_end = token == EOS and len(outputs) < params.min_tokens
        if is_banned or is_early_end or (allowed is not None and token not in allowed):
            value = -math.inf
        found.append(value)
    return found


WAYS: list[tuple[dict[str, Any], Banned]] = [
    ({"logit_bias": {3: 5.0, 9: -100.0, 29: 100.0}}, ()),
    ({"allowed_token_ids": (3, 4, 5, 9, 17)}, ()),
    ({}, ((5,), (4, 9), (9, 9), (3, 4, 5, 6))),
    ({"allowed_token_ids": (3, 4, 5, EOS), "min_tokens": 9}, ((3, 4), (5, 5, 5))),
    (
        {
            "logit_bias": dict.fromkeys(range(3, 9), 2.5),
            "allowed_token_ids": tuple(range(2, 20)),
            "repetition_penalty": 1.3,
            "presence_penalty": 0.3,
            "frequency_penalty": -0.4,
            "min_tokens": 4,
        },
        ((4, 5), (5, 4), (8,)),
    ),
]


@pytest.mark.parametrize(("fields", "banned"), WAYS)
def test_logits_are_changed_by_the_rules(fields: dict[str, Any], banned: Banned) -> None:
    params = SamplingParams(**fields)
    rng = random.Random(4)
    for length in range(12):
        outputs = rng.choices(range(3, 10), k=length)
        _, one = opened(params, banned, outputs)
        row = row_after(outputs)
        before = row.clone()
        torch.testing.assert_close(
            one.adjusted(row), torch.tensor(by_the_rules(row, params, banned, outputs))
        )
        assert torch.equal(row, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("fields", "banned"), WAYS)
def test_a_tail_that_starts_again_anywhere_gives_the_same_tokens(
    fields: dict[str, Any], banned: Banned, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, **fields)
    whole = completed(params, banned)
    for known in range(NUM_TOKENS):
        assert completed(params, banned, whole[:known]) == whole
    for place in range(1, NUM_TOKENS + 1):
        assert not any(whole[:place][-len(ids) :] == ids for ids in banned)
    if params.allowed_token_ids is not None:
        assert set(whole) <= set(params.allowed_token_ids)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("fields", "banned"), WAYS)
def test_drafts_change_no_token(fields: dict[str, Any], banned: Banned, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, **fields)
    whole = completed(params, banned)
    for right in (1, 4, 9):
        drafts = (*whole[:right], 0)
        rows = torch.stack([row_after(drafts[:place]) for place in range(len(drafts) + 1)])
        sampler, one = opened(params, banned)
        assert sampler.sample(rows, [one], [drafts]).tokens == (whole[: right + 1],)


def test_a_neighbor_keeps_its_bits_and_log_probabilities_stay_those_of_the_model() -> None:
    rows = logits(2)
    plain = SamplingParams(logprobs=3)
    limited = SamplingParams(
        temperature=0.0, logit_bias={9: 100.0}, allowed_token_ids=(9, 10), logprobs=1
    )
    sampler = Sampler(vocab_size=rows.shape[1], eos_ids=[EOS])

    alone = sampler.sample(rows[1:], [sequence(plain)])
    both = sampler.sample(rows, [sequence(limited, number=1), sequence(plain)])

    assert (both.tokens[1], both.logprobs[1]) == (alone.tokens[0], alone.logprobs[0])
    ((entry,), _) = both.logprobs
    assert entry is not None
    assert (entry.token_id, entry.logprob) == (9, float(rows[0].log_softmax(0)[9]))


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": (EOS,), "min_tokens": 3},
        {"allowed_token_ids": (5,), "banned": ((5,),)},
        {"allowed_token_ids": (2**30,)},
    ],
)
def test_a_sequence_without_any_token_left_is_refused_alone(fields: dict[str, Any]) -> None:
    banned = fields.pop("banned", ())
    sampler, one = opened(SamplingParams(**fields), banned)
    good = sampler.open(Open(1, PROMPT, len(PROMPT), GREEDY, 1, 4))
    rows = torch.stack([row_after(()), row_after(())])

    sample = sampler.sample(rows, [one, good])

    assert sample.tokens[1] == (int(rows[1].argmax()),)
    ((seq, reason),) = sample.refused
    assert seq == 0
    assert "allowed_token_ids" in reason
    fields["banned"] = banned


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_and_a_limit_hold_together(temperature: float) -> None:
    model = Model()
    letters: Callable[[str], int] = lambda letter: id_of(model.tokenizer, letter)  # noqa: E731 (typed)
    allowed = (*map(letters, "abc"), model.eos)
    output = StructuredOutput(regex="[b-f]{3,6}")
    params = SamplingParams(
        structured_outputs=output, allowed_token_ids=allowed, temperature=temperature
    )

    text = model.text(model.complete(params))

    assert 3 <= len(text) <= 6
    assert set(text) <= {"b", "c"}


def test_a_grammar_and_a_limit_without_a_common_token_are_refused() -> None:
    model = Model()
    output = StructuredOutput(regex="[b-f]{3,6}")
    params = SamplingParams(
        structured_outputs=output, allowed_token_ids=(id_of(model.tokenizer, "z"),)
    )

    sample = model.sampler.sample(model.row(()).unsqueeze(0), [model.open(params)])

    assert "structured_outputs" in sample.refused[0][1]
