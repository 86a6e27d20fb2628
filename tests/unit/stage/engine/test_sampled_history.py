"""What a sequence's history does to its rows: penalties, the tokens before min_tokens, and
log-probabilities of the raw logits."""

from __future__ import annotations

import torch

from shardline.contract.job import SamplingParams
from tests.unit.stage.engine.sampled_rows import EOS, GREEDY, VOCAB, logits, sampler, sequence


def test_penalties_are_those_of_the_textbook() -> None:
    params = SamplingParams(
        repetition_penalty=1.5, presence_penalty=0.25, frequency_penalty=0.5, min_tokens=0
    )
    row = torch.zeros(VOCAB)
    row[[1, 2, 9, 10]] = torch.tensor([3.0, -3.0, 3.0, -3.0])

    adjusted = sequence(params, outputs=(9, 9, 10)).adjusted(row)

    expected = torch.zeros(VOCAB)
    expected[[1, 2, 9, 10]] = torch.tensor([2.0, -4.5, 2.0 - 0.25 - 1.0, -4.5 - 0.25 - 0.5])
    assert torch.equal(adjusted, expected)
    assert row[1] == 3.0


def test_penalties_of_a_restored_sequence_are_bit_equal() -> None:
    params = SamplingParams(repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.3)
    outputs = tuple(token % 17 for token in range(100))
    grown = sequence(params)
    for token in outputs:
        grown.extend((token,))
    row = logits(1)[0]

    assert torch.equal(grown.adjusted(row), sequence(params, outputs=outputs).adjusted(row))


def test_no_stop_token_comes_before_min_tokens() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(3, 2**30))
    row = logits(1)
    row[0, EOS], row[0, 3] = 90.0, 80.0
    first = int(row[0].masked_fill(row[0] > 50, 0.0).argmax())

    tokens = [
        sampler().sample(row, [sequence(params, outputs=(5,) * num)]).tokens[0][0]
        for num in range(4)
    ]

    assert tokens == [first, first, EOS, EOS]


def test_an_ignored_eos_is_never_masked() -> None:
    row = logits(1)
    row[0, EOS] = 90.0
    params = SamplingParams(temperature=0.0, min_tokens=5, ignore_eos=True)

    assert sampler().sample(row, [sequence(params)]).tokens == ((EOS,),)


def test_logprobs_are_those_of_the_raw_logits() -> None:
    rows = logits(2, dtype=torch.bfloat16)
    params = SamplingParams(temperature=0.3, top_k=2, repetition_penalty=2.0, logprobs=4)
    expected = rows[0].float().log_softmax(0)

    sample = sampler().sample(rows, [sequence(params), sequence(GREEDY)])

    (first,), (second,) = sample.logprobs
    assert second is None
    assert first is not None
    assert (first.token_id,) == sample.tokens[0]
    assert first.logprob == float(expected[first.token_id])
    assert [value for _, value in first.top] == expected.topk(4).values.tolist()
    assert [float(expected[token]) for token, _ in first.top] == [value for _, value in first.top]


def test_logprobs_0_gives_the_chosen_token_alone() -> None:
    ((entry,),) = sampler().sample(logits(1), [sequence(SamplingParams(logprobs=0))]).logprobs

    assert entry is not None
    assert entry.top == ()
