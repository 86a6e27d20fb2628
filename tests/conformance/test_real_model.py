"""A model with trained weights: transformers' tokens in float32, and what the narrower dtypes cost
in quality."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers as tf
from torch import Tensor

from services.stage.attention.paged_kv import Span
from services.stage.device.device import Device
from services.stage.engine.executor import Executor
from shardline.contract.job import SamplingParams
from shardline_scheduler.kv_blocks import blocks_for
from tests.chain import complete, load_chain, requests
from tests.real_model import real_model
from tests.repository import REPOSITORY

NUM_NEW = 24
BUDGET = 64
"""Below most prompts, so that these take several chunks."""
KV_BYTES = 96 * 2**20
LOGPROB_ERROR = 1e-3
"""4e-5 was measured in float32; a row of another sequence, position or scale is off by 0.1 and
more."""
WINDOW = 256
NUM_WINDOWS = 4
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a lighthouse keeper who",
    "def fibonacci(n: int) -> int:\n    ",
    "Der Zug nach München hält heute nicht in",
    "El veloz murciélago hindú comía feliz cardillo y",
    "日本の首都は",
    "Москва - столица",
    "🐱🐶 emoji: a cat and a dog. 🚀 means",
    '{"name": "Ada", "born": 1815, "known_for": [',
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "SELECT id, state FROM jobs WHERE",
    "  leading spaces\tand tabs\n\n\nand lines",
)
QUESTIONS = ("What is the capital of Italy?", "Name three colors.", "Écris une phrase sur la mer.")


@pytest.fixture(scope="module")
def reference() -> Iterator[tf.PreTrainedModel]:
    yield tf.AutoModelForCausalLM.from_pretrained(real_model(), dtype=torch.float32).eval()
    log_probabilities.cache_clear()


@pytest.fixture(scope="module")
def exact(reference: tf.PreTrainedModel) -> float:
    """transformers' perplexity."""
    return perplexity(reference_logits(reference, window) for window in text_windows())


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Texts, chats, and the beginning of a long text that spans several blocks of KV."""
    tokenizer = tf.AutoTokenizer.from_pretrained(real_model())
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]
    texts = [*PROMPTS, license_text()[:2500]]
    return [tokenizer(text)["input_ids"] for text in texts] + chats


def license_text() -> str:
    return (REPOSITORY / "LICENSE").read_text(encoding="utf-8")


@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_pipeline_gives_the_tokens_and_log_probabilities_of_transformers(
    num_stages: int,
    device: Device,
    tmp_path: Path,
    reference: tf.PreTrainedModel,
    prompts: list[list[int]],
) -> None:
    stages = load_chain(real_model(), num_stages, device, tmp_path, kv_bytes=KV_BYTES)
    greedy = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, logprobs=0)

    ends = complete(stages, requests(prompts, greedy), budget=BUDGET, seats=8)

    assert all(stage.exact for stage in stages)
    for prompt, end in zip(prompts, ends, strict=True):
        expected = log_probabilities(reference, tuple(prompt), tuple(end.output_ids))
        assert expected.argmax(-1).tolist() == list(end.output_ids)
        assert end.logprobs is not None
        found = torch.tensor([one.logprob for one in end.logprobs])
        likeliest = expected.max(-1).values
        assert (found - likeliest).abs().max() < LOGPROB_ERROR


@cache
@torch.inference_mode()
def log_probabilities(
    model: tf.PreTrainedModel, prompt: tuple[int, ...], output: tuple[int, ...]
) -> Tensor:
    """What transformers gives for each place of the output, [len(output), vocabulary], when the
    tokens before it are those: a greedy output is transformers' own exactly if each token is the
    likeliest of its row."""
    logits = model(torch.tensor([[*prompt, *output[:-1]]])).logits[0, len(prompt) - 1 :]
    return logits.float().log_softmax(-1)


@pytest.mark.parametrize(
    ("dtype", "most"), [("float32", 1.0001), ("bfloat16", 1.005), ("int8", 1.02)]
)
def test_a_narrower_dtype_costs_no_more_perplexity_than_documented(
    dtype: str, most: float, device: Device, tmp_path: Path, exact: float
) -> None:
    (stage,) = load_chain(real_model(), 1, device, tmp_path, dtype=dtype, kv_bytes=KV_BYTES)

    cost = perplexity(stage_logits(stage, window) for window in text_windows())

    assert 1 / most < cost / exact < most


def text_windows() -> Iterator[Tensor]:
    """Pieces of an ordinary text, ids of shape [WINDOW]."""
    ids = tf.AutoTokenizer.from_pretrained(real_model())(license_text())["input_ids"]
    for start in range(0, NUM_WINDOWS * WINDOW, WINDOW):
        yield torch.tensor(ids[start : start + WINDOW])


@torch.inference_mode()
def stage_logits(stage: Executor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The window, and logits of all its places but the last."""
    span = Span(start=0, length=len(ids), blocks=list(range(blocks_for(len(ids)))))
    return ids, stage.forward.sampled_outputs(
        [span], ids, list(range(len(ids) - 1))
    ).float().clone()


@torch.inference_mode()
def reference_logits(model: tf.PreTrainedModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The same by transformers."""
    return ids, model(ids[None]).logits[0, :-1].float()


def perplexity(scored: Iterator[tuple[Tensor, Tensor]]) -> float:
    """Over every token of the windows but their first."""
    losses = [
        torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
        for ids, logits in scored
    ]
    return float(torch.cat(losses).double().mean().exp())
