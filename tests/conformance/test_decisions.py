"""Probabilities of answers to questions: those that transformers' logits give in float32, whatever
runs beside them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers as tf

from services.stage.device.device import Device
from services.stage.model.model_info import ModelInfo
from shardline.contract.decision import Choice, Option, Predicate, Question, Score, decide
from shardline.contract.job import SamplingParams
from shardline_scheduler.sequence import Request
from shardline_server.tokenize import Tokens
from tests.chain import complete, load_chain
from tests.real_model import real_model
from tests.tiny_head import CLERK

MOST_WRONG = 1e-3
BUDGET = 64
"""Below most prompts, so that these take several chunks."""
KV_BYTES = 96 * 2**20
INPUTS = (
    "I was charged twice this month and nobody answers my mails. I want my money back! " * 3,
    "The app crashes whenever I open the settings, and it does so again and again. " * 3,
    "Just wanted to say thanks: the new version is great and a joy to use. " * 3,
)
QUESTIONS: tuple[Question, ...] = (
    Predicate(instructions="The customer is angry."),
    Choice(
        instructions="Which team should answer?",
        choices=("billing", Option(value="technical", description="errors"), "sales", True),
    ),
    Choice(instructions="Which number is in it?", choices=tuple(str(n) for n in range(40))),
    Score(instructions="How urgent is it?", levels=("not at all", "somewhat", "very")),
)


@cache
def reference(folder: Path) -> tf.PreTrainedModel:
    return tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(autouse=True, scope="module")
def _references_are_freed() -> Iterator[None]:
    yield
    reference.cache_clear()
    probabilities.cache_clear()


@pytest.mark.parametrize(
    ("name", "num_stages", "seats"),
    [
        pytest.param("smollm2", 1, 1, id="smollm2 with shared prefixes"),
        pytest.param("smollm2", 2, 8, id="smollm2 in two stages, all at once"),
        pytest.param("clerk", 1, 8, id="clerk"),
    ],
)
def test_probabilities_are_those_of_transformers(
    name: str, num_stages: int, seats: int, device: Device, tmp_path: Path
) -> None:
    folder = CLERK if name == "clerk" else real_model()
    tokens = Tokens.from_row(ModelInfo.read(folder).row(name=name, fingerprint="w"))
    stages = load_chain(folder, num_stages, device, tmp_path, kv_bytes=KV_BYTES)
    asked = [(text, question) for text in INPUTS for question in QUESTIONS]
    wanted = [asking(tokens, text, question, place) for place, (text, question) in enumerate(asked)]

    ends = complete(stages, wanted, budget=BUDGET, seats=seats)

    for request, end, (_, question) in zip(wanted, ends, asked, strict=True):
        assert end.logprobs is not None
        (answer,) = end.logprobs
        assert tuple(token for token, _ in answer.top) == request.labels
        found = decide(question, [logprob for _, logprob in answer.top])
        expected, mass = probabilities(folder, tuple(request.prompt_ids), request.labels)
        assert found.probabilities == pytest.approx(expected, abs=MOST_WRONG)
        assert found.label_mass == pytest.approx(mass, abs=MOST_WRONG)
        assert end.output_ids == (request.labels[expected.index(max(expected))],)
    if seats == 1:
        # One after the other, all but the first question find their input's KV.
        assert sum(end.num_cached > 0 for end in ends) >= len(ends) - len(INPUTS)


def asking(tokens: Tokens, text: str, question: Question, place: int) -> Request:
    """What a head makes of a question about a text."""
    prepared = tokens.prepare(prompt=text, params=SamplingParams(question=question))
    assert prepared.max_tokens == 1
    return Request(
        key=(str(place), 1),
        prompt_ids=prepared.prompt_ids,
        params=SamplingParams(max_tokens=1, logprobs=0),
        seed=place,
        labels=tuple(label.token_id for label in tokens.question_labels.of(question)),
    )


@cache
@torch.inference_mode()
def probabilities(
    folder: Path, prompt: tuple[int, ...], labels: tuple[int, ...]
) -> tuple[list[float], float]:
    """Those of the labels behind the prompt among themselves, and their share of all."""
    every = reference(folder)(torch.tensor([prompt])).logits[0, -1].double().softmax(0)
    of_labels = every[list(labels)]
    found: list[float] = (of_labels / of_labels.sum()).tolist()
    return found, float(of_labels.sum())
