"""Pipelines of 1, 2 and 3 stages give token for token what transformers' `generate` gives, in every
architecture."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from services.stage.device.device import Device
from services.stage.model.model_info import ModelInfo
from services.stage.model.text_part import model_class
from shardline.base.errors import Invalid
from shardline.contract.job import SamplingParams
from tests.chain import generate, load_chain, requests
from tests.models import COMMON, CONFIGS, VOCAB_SIZE, save_drawn, save_model
from tests.multimodal_models import CONTAINERS, save_container

NUM_NEW = 12
BUDGET = 32
"""Below most prompts, so that these take several chunks."""
LENGTHS = (1, 3, 17, 70, 41, 130)
"""The longest spans three KV blocks and several sliding windows."""


def prompts() -> list[list[int]]:
    """The same every time."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS
    ]


@cache
def reference(path: Path) -> list[tuple[int, ...]]:
    """Each prompt alone through transformers' greedy `generate` in float32, by its plainest
    code."""
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    config = tf.AutoConfig.from_pretrained(path)
    # The container of Llama 4 cannot answer without an image (transformers 5.24)
    kind = tf.AutoModelForCausalLM if config.model_type == "llama4" else model_class(config)
    model = kind.from_pretrained(path, dtype=torch.float32, **plain).eval()
    model.generation_config.eos_token_id = None
    outputs = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_NEW,
            do_sample=False,
            pad_token_id=0,
        )
        outputs.append(tuple(out[0, len(prompt) :].tolist()))
    return outputs


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("name", CONTAINERS)
def test_the_text_of_a_multimodal_model_is_that_of_the_whole_one(
    name: str, num_stages: int, model_folder: Path, device: Device
) -> None:
    path = model_folder / name
    if not path.exists():
        save_container(model_folder, name)
    joined = ModelInfo.read(path).joined
    if joined is not None and num_stages > 1:
        with pytest.raises(Invalid, match=r"layers 0-\d+ must stay together, because"):
            load_chain(path, num_stages, device, model_folder)
        return
    expected = reference(path)
    stages = load_chain(path, num_stages, device, model_folder)
    greedy = SamplingParams(max_tokens=NUM_NEW, temperature=0.0)

    assert generate(stages, requests(prompts(), greedy), budget=BUDGET) == expected
    assert all(stage.exact for stage in stages)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_pipeline_generates_the_tokens_of_generate(
    name: str, num_stages: int, model_folder: Path, device: Device
) -> None:
    path = model_folder / name
    if not path.exists():
        save_model(model_folder, name)
    expected = reference(path)
    stages = load_chain(path, num_stages, device, model_folder)
    greedy = SamplingParams(max_tokens=NUM_NEW, temperature=0.0)

    together = generate(stages, requests(prompts(), greedy), budget=BUDGET)

    assert together == expected
    assert len({token for output in expected for token in output}) > len(LENGTHS), (
        "outputs too dull to tell"
    )
    assert all(stage.exact for stage in stages)


@pytest.mark.parametrize(
    ("name", "norms"), [("stablelm", "qk_layernorm"), ("cohere", "use_qk_norm")]
)
def test_a_norm_for_each_head_is_no_layer_and_no_product(
    name: str, norms: str, tmp_path: Path, device: Device
) -> None:
    # Given as many heads as layers, whose norms are lists as long, or weights of two dimensions
    changes: dict[str, Any] = {norms: True}
    path = save_model(tmp_path, name, **changes)
    stages = load_chain(path, 2, device, tmp_path)

    found = generate(
        stages,
        requests(prompts(), SamplingParams(max_tokens=NUM_NEW, temperature=0.0)),
        budget=BUDGET,
    )

    assert found == reference(path)
    assert all(stage.exact for stage in stages)


@pytest.mark.parametrize("window", [24, 512])
def test_a_window_that_only_a_mask_applies_is_seen(
    window: int, tmp_path: Path, device: Device
) -> None:
    config = tf.PhimoeConfig(
        **COMMON, num_local_experts=4, num_experts_per_tok=2, sliding_window=window
    )
    path = save_drawn(tmp_path / "phimoe", lambda: tf.AutoModelForCausalLM.from_config(config))
    stages = load_chain(path, 2, device, tmp_path)
    greedy = SamplingParams(max_tokens=NUM_NEW, temperature=0.0)

    assert generate(stages, requests(prompts(), greedy), budget=BUDGET) == reference(path)
    assert all(stage.exact for stage in stages)


def test_a_vocabulary_smaller_than_a_miniatures_is_served(tmp_path: Path, device: Device) -> None:
    path = save_model(tmp_path, vocab_size=40)
    (stage,) = load_chain(path, 1, device, tmp_path)
    assert stage.info.vocab_size == 40
