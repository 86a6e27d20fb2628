"""Log-probabilities of prompts: those that transformers' logits give, and the same bits whatever
runs beside them, in any chunks, after a preemption, and as those of an output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
import transformers as tf

from services.stage.device.device import Device
from shardline.contract.job import PromptLogprob, SamplingParams
from shardline_scheduler.events import SequenceFinished
from shardline_scheduler.sequence import Request
from tests.chain import Pressure, complete, load_chain, requests
from tests.real_model import real_model
from tests.tiny_head import CLERK

MOST_WRONG = 1e-3
NUM_TOP = 3
SCORING = SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=NUM_TOP)
CLERK_VOCABULARY = 128
"""Tokens that any clerk has."""


def prompts(num_tokens: int, *, vocab_size: int) -> list[list[int]]:
    """Three that begin alike."""
    common = [(7 * place + 3) % vocab_size for place in range(num_tokens - 30)]
    return [[*common, *((31 * place + own) % vocab_size for place in range(30))] for own in (1, 2)]


def scores(end: SequenceFinished) -> tuple[PromptLogprob, ...]:
    """Those of all tokens but the first."""
    assert end.prompt_logprobs is not None
    first, *rest = end.prompt_logprobs
    assert first is None
    return tuple(one for one in rest if one is not None)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_they_are_those_of_transformers(num_stages: int, device: Device, tmp_path: Path) -> None:
    folder = real_model()
    reference = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    stages = load_chain(folder, num_stages, device, tmp_path)
    wanted = requests(prompts(150, vocab_size=40_000), SCORING)

    ends = complete(stages, wanted, budget=64, seats=8)

    for request, end in zip(wanted, ends, strict=True):
        found = scores(end)
        assert [one.token_id for one in found] == list(request.prompt_ids[1:])
        expected = every_logprob(reference, request.prompt_ids)
        for one, row in zip(found, expected, strict=False):
            assert one.logprob == pytest.approx(float(row[one.token_id]), abs=MOST_WRONG)
            assert one.rank == pytest.approx(1 + int((row > row[one.token_id]).sum()), rel=0.01)
            values, _ = row.topk(NUM_TOP)
            told = [value for _, value in one.top]
            assert told == pytest.approx(values.tolist(), abs=MOST_WRONG)


@torch.inference_mode()
def every_logprob(model: tf.PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """The log-probabilities behind each token, float64 [T, V]."""
    logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits.double().log_softmax(1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_neighbors_prefixes_and_preemptions_change_no_bit(
    dtype: str, device: Device, tmp_path: Path
) -> None:
    stages = load_chain(CLERK, 2, device, tmp_path, dtype=dtype)
    params = msgspec.structs.replace(SCORING, max_tokens=80)
    wanted = requests(prompts(100, vocab_size=CLERK_VOCABULARY), params)
    plain = [
        replace(one, key=(f"plain {one.key[0]}", 1), params=unscored(one.params)) for one in wanted
    ]
    alone = [scores(complete(stages, [one], budget=512, seats=1)[0]) for one in wanted]

    small = complete(stages, [*plain, *wanted], budget=23, seats=8)
    in_turn = complete(stages, [*plain, *wanted], budget=512, seats=1)
    pressed = complete(
        stages, wanted, budget=64, seats=8, pressure=Pressure(num_blocks=4, num_slots=2)
    )

    for ends in (small[2:], in_turn[2:], pressed):
        assert [scores(end) for end in ends] == alone
    for end in small[:2]:
        assert end.prompt_logprobs is None


def unscored(params: SamplingParams) -> SamplingParams:
    return msgspec.structs.replace(params, prompt_logprobs=None)


def test_a_token_has_the_bits_that_it_had_as_an_output(device: Device, tmp_path: Path) -> None:
    stages = load_chain(CLERK, 1, device, tmp_path)
    said = SamplingParams(max_tokens=40, temperature=1.0, logprobs=NUM_TOP)
    (first, *_) = wanted = requests(prompts(70, vocab_size=CLERK_VOCABULARY), said)
    (end, *_) = complete(stages, wanted, budget=64, seats=8)
    assert end.logprobs is not None
    whole = Request(
        key=("whole", 1),
        prompt_ids=(*first.prompt_ids, *end.output_ids),
        params=SCORING,
        seed=5,
    )

    (scored,) = complete(stages, [whole], budget=50, seats=1)

    assert [(one.token_id, one.logprob, one.top) for one in scores(scored)[-40:]] == [
        (one.token_id, one.logprob, one.top) for one in end.logprobs
    ]
