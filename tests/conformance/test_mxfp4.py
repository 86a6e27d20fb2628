"""gpt-oss with experts in MXFP4, as it is published, in stages: what transformers makes of the same
files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as tf
from transformers.utils.quantization_config import Mxfp4Config

from services.stage.device.device import Device
from shardline.contract.job import SamplingParams
from tests.chain import complete, generate, load_chain, requests
from tests.models import VOCAB_SIZE
from tests.mxfp4_models import save_mxfp4

NUM_NEW = 12
BUDGET = 32
"""Below most prompts, so that these take several chunks."""
LENGTHS = (1, 17, 41, 70)
"""The longest spans several sliding windows."""
LOGPROB_ERROR = 1e-4


@pytest.fixture(scope="module")
def folders(model_folder: Path) -> tuple[Path, Path]:
    """A model with float weights, and the same one packed."""
    return save_mxfp4(model_folder / "mxfp4")


@pytest.fixture(scope="module")
def reference(folders: tuple[Path, Path]) -> tf.PreTrainedModel:
    """The packed files, unpacked by transformers."""
    model = tf.AutoModelForCausalLM.from_pretrained(
        folders[1],
        dtype=torch.float32,
        quantization_config=Mxfp4Config(dequantize=True),
        attn_implementation="eager",
        experts_implementation="eager",
    ).eval()
    model.generation_config.eos_token_id = None
    return model


def prompts() -> list[list[int]]:
    """The same every time."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS
    ]


@pytest.mark.parametrize("num_stages", [1, 2])
@torch.inference_mode()
def test_stages_give_the_tokens_and_log_probabilities_of_transformers(
    num_stages: int,
    folders: tuple[Path, Path],
    reference: tf.PreTrainedModel,
    device: Device,
    tmp_path: Path,
) -> None:
    stages = load_chain(folders[1], num_stages, device, tmp_path)
    greedy = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, logprobs=0)

    ends = complete(stages, requests(prompts(), greedy), budget=BUDGET, seats=8)

    assert all(stage.exact for stage in stages)
    for prompt, end in zip(prompts(), ends, strict=True):
        ids = torch.tensor([[*prompt, *end.output_ids]])
        logits = reference(ids).logits[0, len(prompt) - 1 : -1]
        likeliest, expected = logits.log_softmax(-1).max(-1)
        assert list(end.output_ids) == expected.tolist()
        assert end.logprobs is not None
        found = torch.tensor([one.logprob for one in end.logprobs])
        assert (found - likeliest).abs().max() < LOGPROB_ERROR
    assert len({token for end in ends for token in end.output_ids}) > len(LENGTHS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4"])
def test_packed_experts_give_the_tokens_of_float_ones(
    dtype: str, folders: tuple[Path, Path], device: Device, tmp_path: Path
) -> None:
    wanted = requests(prompts(), SamplingParams(max_tokens=NUM_NEW, temperature=0.8))
    whole, packed = folders
    expected = generate(load_chain(whole, 1, device, tmp_path, dtype=dtype), wanted, budget=BUDGET)
    for num_stages in (1, 2):
        stages = load_chain(packed, num_stages, device, tmp_path, dtype=dtype)
        assert generate(stages, wanted, budget=BUDGET) == expected
