"""A whole stage over our Triton kernels: its rows are exact, and its tokens are those of
`generate`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.stage.engine.exactness import Probe
from shardline.contract.job import SamplingParams
from tests.chain import generate, requests
from tests.conformance.test_architectures import BUDGET, prompts, reference
from tests.models import save_model
from tests.unit.stage.engine.triton_stage import NUM_BLOCKS, load_forward, stage_of

NUM_NEW = 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_its_rows_are_exact(dtype: torch.dtype, tmp_path: Path) -> None:
    forward = load_forward(save_model(tmp_path, num_hidden_layers=1), dtype)

    assert Probe(forward.sampled_outputs, forward.random_inputs, NUM_BLOCKS).passes()


def test_its_tokens_are_those_of_generate(tmp_path: Path) -> None:
    path = save_model(tmp_path, num_hidden_layers=2)
    greedy = SamplingParams(max_tokens=NUM_NEW, temperature=0.0)

    with stage_of(load_forward(path, torch.float32), tmp_path) as stage:
        found = generate([stage], requests(prompts()[2:4], greedy), budget=BUDGET)

    assert found == [ids[:NUM_NEW] for ids in reference(path)[2:4]]
