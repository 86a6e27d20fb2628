"""The sampler: the right distribution, and nothing but a row's own logits, parameters, seed and
history decides."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.stage.sampling.sampler import Sample
from services.stage.sampling.uniform import uniform
from shardline.contract.job import SamplingParams, TokenLogprob
from tests.unit.stage.engine.sampled_rows import GREEDY, VOCAB, logits, sampler, sequence

MIXED = [
    GREEDY,
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.8, top_p=0.95, logprobs=3),
    SamplingParams(temperature=1.5, top_k=20, top_p=0.5),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, logprobs=0),
    SamplingParams(
        temperature=0.7, presence_penalty=0.5, frequency_penalty=-0.3, repetition_penalty=0.8
    ),
    SamplingParams(min_tokens=100, stop_token_ids=(3, 2**30)),
]


def draws(row: Tensor, params: SamplingParams, num: int) -> Tensor:
    """How often each token came at output indices 0 … num - 1."""
    one = sampler(len(row))
    state = sequence(params, vocab=len(row))
    counts = torch.zeros(len(row))
    for _ in range(num):
        ((token,),) = one.sample(row.unsqueeze(0), [state]).tokens
        counts[token] += 1
        state.extend((token,))
    return counts


def allowed(row: Tensor, params: SamplingParams) -> Tensor:
    """The textbook: sort, sum, cut. Probabilities in float64 of the tokens that may be drawn."""
    row = row.double() / params.temperature
    if params.top_k:
        row = row.masked_fill(
            row < row.sort(descending=True).values[min(params.top_k, len(row)) - 1], -math.inf
        )
    weights = row.softmax(0)
    heavier = torch.stack([weights[weights > weight].sum() for weight in weights])
    kept = torch.where(
        (heavier < params.top_p) & (weights >= params.min_p * weights.max()), weights, 0.0
    )
    return kept / kept.sum()


def assert_fits(counts: Tensor, expected: Tensor) -> None:
    """Chi-square, four standard deviations wide. The draws are keyed, so the outcome never
    changes."""
    expected = expected * counts.sum()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi_square = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    freedom = int(possible.sum()) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 1


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.7),
        SamplingParams(top_k=12, top_p=0.6, temperature=1.7),
        SamplingParams(min_p=0.2),
        SamplingParams(top_p=0.9, min_p=0.1, top_k=15),
    ],
)
@pytest.mark.parametrize("vocab", [20, 300])
def test_tokens_come_as_often_as_they_should(params: SamplingParams, vocab: int) -> None:
    row = logits(1, vocab=vocab, scale=1.0)[0]

    assert_fits(draws(row, params, 2000), allowed(row, params))


@settings(max_examples=100)
@given(
    values=st.lists(st.integers(-6, 6), min_size=1, max_size=300),
    top_k=st.integers(0, 40),
    top_p=st.sampled_from([1e-6, 0.1, 0.503, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.51, 1.0]),
)
def test_only_tokens_within_the_limits_are_drawn(
    values: list[int], top_k: int, top_p: float, min_p: float
) -> None:
    row = torch.tensor(values, dtype=torch.float32)
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)

    counts = draws(row, params, 8)

    assert counts[allowed(row, params) == 0].sum() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_alone_in_any_batch_and_in_any_order(dtype: torch.dtype) -> None:
    rows = logits(32, dtype=dtype)
    states = [
        sequence(MIXED[row % len(MIXED)], seed=row, outputs=(9,) * (row % 5)) for row in range(32)
    ]
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0)).tolist()

    whole = sampler().sample(rows, states)
    alone = [
        sampler().sample(rows[row : row + 1].clone(), [state]) for row, state in enumerate(states)
    ]
    mixed = sampler().sample(rows[order], [states[row] for row in order])

    assert whole.tokens == tuple(one.tokens[0] for one in alone)
    assert whole.logprobs == tuple(one.logprobs[0] if one.logprobs else (None,) for one in alone)
    assert mixed.tokens == tuple(whole.tokens[row] for row in order)
    assert mixed.logprobs == tuple(whole.logprobs[row] for row in order)


@pytest.mark.parametrize("params", MIXED)
@pytest.mark.parametrize("cut", [0, 1, 7, 19])
def test_a_restored_sequence_draws_the_same_token(params: SamplingParams, cut: int) -> None:
    rows = logits(20)
    one = sampler()
    state = sequence(params)
    outputs = []
    for row in rows:
        ((token,),) = one.sample(row.unsqueeze(0), [state]).tokens
        outputs.append(token)
        state.extend((token,))

    restored = sequence(params, outputs=tuple(outputs[:cut]), number=5)

    assert restored.index == cut
    assert sampler().sample(rows[cut : cut + 1], [restored]).tokens == ((outputs[cut],),)


def test_random_numbers_are_a_part_of_the_contract() -> None:
    assert [uniform(0, 0, 0), uniform(2**63 - 1, 5, 1)] == [0.156742553465558, 0.22339000263672004]
    mean = sum(uniform(3, index, 0) for index in range(4000)) / 4000
    assert abs(mean - 0.5) < 0.02


@pytest.mark.parametrize(("number", "token"), [(0.0, 200), (1 - 2.0**-53, 700)])
def test_no_number_leads_to_a_token_without_weight(
    monkeypatch: pytest.MonkeyPatch, number: float, token: int
) -> None:
    monkeypatch.setattr("services.stage.sampling.sampler.uniform", lambda *_: number)
    row = torch.full((1, VOCAB), -math.inf)
    row[0, [200, 700]] = 1.0

    assert sampler().sample(row, [sequence(SamplingParams(top_p=0.999))]).tokens == ((token,),)


def test_another_seed_index_or_attempt_gives_another_number() -> None:
    keys = [
        (seed, index, attempt) for seed in range(10) for index in range(10) for attempt in range(10)
    ]

    assert len({uniform(*key) for key in keys}) == len(keys)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_first_of_the_largest(dtype: torch.dtype) -> None:
    rows = logits(3, dtype=dtype)
    rows[0, [40, 41, 900]] = 100.0

    sample = sampler().sample(rows, [sequence(GREEDY)] * 3)

    assert sample == Sample(
        ((40,), *((best,) for best in rows[1:].float().argmax(1).tolist())), (), ()
    )


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1e-300),
        SamplingParams(temperature=1e-6),
        SamplingParams(top_p=1e-9),
        SamplingParams(top_k=1),
    ],
)
def test_the_narrowest_limits_are_greedy(params: SamplingParams) -> None:
    rows = logits(8)

    assert sampler().sample(rows, [sequence(params)] * 8).tokens == tuple(
        (best,) for best in rows.argmax(1).tolist()
    )


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(top_p=0.9, logprobs=2)])
def test_a_row_that_is_no_distribution_is_bad_and_the_others_go_on(
    value: float, params: SamplingParams
) -> None:
    rows = logits(3)
    states = [sequence(params, number=number) for number in (4, 5, 6)]
    undisturbed = sampler().sample(rows, states)
    rows[1, 17] = value

    sample = sampler().sample(rows, states)

    assert sample.bad == (5,)
    assert sample.tokens == (undisturbed.tokens[0], (0,), undisturbed.tokens[2])
    assert sample.logprobs == (
        undisturbed.logprobs and (undisturbed.logprobs[0], (None,), undisturbed.logprobs[2])
    )


def test_a_row_without_any_possible_token_is_bad() -> None:
    assert sampler().sample(
        torch.full((1, VOCAB), -math.inf), [sequence(SamplingParams(), number=3)]
    ).bad == (3,)


def test_no_rows_give_no_tokens() -> None:
    assert sampler().sample(torch.empty(0, VOCAB), []) == Sample((), (), ())


@pytest.mark.parametrize("params", MIXED)
@pytest.mark.parametrize("num_true", [0, 1, 4, 7])
def test_drafts_are_sampled_as_if_one_by_one_up_to_the_first_that_is_wrong(
    params: SamplingParams, num_true: int
) -> None:
    rows = logits(8)
    alone = sequence(params)
    tokens = list[int]()
    logprobs = list[TokenLogprob | None]()
    for row in rows:
        one = sampler().sample(row.unsqueeze(0), [alone])
        tokens += one.tokens[0]
        logprobs += one.logprobs[0] if one.logprobs else ()
        alone.extend(one.tokens[0])
    drafts = (*tokens[:num_true], *((token + 1) % VOCAB for token in tokens[num_true:7]))
    state = sequence(params)
    before = sequence(GREEDY)
    after = sequence(params, seed=3)
    beside = sampler().sample(rows[:2], [before, after])

    sample = sampler().sample(
        torch.cat([rows[:1], rows, rows[1:2]]), [before, state, after], [(), drafts, ()]
    )

    assert sample.tokens == (beside.tokens[0], tuple(tokens[: num_true + 1]), beside.tokens[1])
    assert (sample.logprobs[1] if sample.logprobs else ()) == tuple(logprobs[: num_true + 1])
    assert state.index == num_true


def test_logits_that_are_not_finite_end_a_run_where_they_are_reached_and_only_there() -> None:
    rows = logits(4)
    best = rows.argmax(1).tolist()
    rows[2, 17] = math.nan
    params = SamplingParams(temperature=0.0, logprobs=0)

    reached = sampler().sample(rows, [sequence(params, number=5)], [(best[0], best[1], 0)])
    missed = sampler().sample(rows, [sequence(params, number=5)], [(best[0], best[1] + 1, 0)])

    assert (reached.tokens, reached.bad) == (((best[0], best[1], 0),), (5,))
    assert [entry and entry.token_id for entry in reached.logprobs[0]] == [best[0], best[1], None]
    assert (missed.tokens, missed.bad) == (((best[0], best[1]),), ())


@pytest.mark.parametrize(
    ("params", "value"),
    [
        (SamplingParams(temperature=0.7, repetition_penalty=1e-40), 5.0),
        (SamplingParams(temperature=0.0, repetition_penalty=1e-40), 5.0),
        (SamplingParams(temperature=0.7, repetition_penalty=0.01, top_k=3), 3e37),
        (SamplingParams(temperature=0.7, repetition_penalty=10.0, presence_penalty=2.0), -3e38),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_row_that_penalties_make_infinite_is_bad_and_the_others_go_on(
    params: SamplingParams, value: float, place: int
) -> None:
    rows = logits(3)
    alone = [
        sampler().sample(rows[[row]], [sequence(MIXED[2], seed=row, number=row)])
        for row in range(3)
    ]
    rows[place] = value
    sequences = [sequence(MIXED[2], seed=row, number=row) for row in range(3)]
    sequences[place] = sequence(params, outputs=tuple(range(VOCAB)), number=place)
    found = sampler().sample(rows, sequences)
    assert found.bad == (place,)
    assert found.tokens[place] == (0,)
    for row in {0, 1, 2} - {place}:
        assert (found.tokens[row], found.logprobs[row]) == (
            alone[row].tokens[0],
            alone[row].logprobs[0],
        )


def test_a_mask_that_leaves_no_token_makes_its_own_row_bad() -> None:
    masked = sequence(
        SamplingParams(min_tokens=5, stop_token_ids=tuple(range(5))), vocab=5, number=3
    )
    assert sampler(5).sample(logits(1, vocab=5), [masked]).bad == (3,)


def test_top_p_0_is_the_likeliest_token() -> None:
    rows = logits(50)
    found = sampler().sample(
        rows, [sequence(SamplingParams(temperature=2.0, top_p=0.0), seed=n) for n in range(50)]
    )
    assert found.tokens == tuple((int(token),) for token in rows.argmax(1))
