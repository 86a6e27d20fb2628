"""A whole stage over our Triton kernels, interpreted: its rows are exact, and its tokens are those of `generate`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from services.stage.attention.attention import Attention, PagedKv
from services.stage.attention.offload_area import OffloadArea
from services.stage.attention.triton_backend import TritonBackend
from services.stage.engine.exactness import Probe
from services.stage.engine.executor import Executor
from services.stage.engine.forward import Forward
from services.stage.engine.memory import Limits
from services.stage.model.fused import fuse_norms
from services.stage.model.kv_shapes import probe_kv_shapes
from services.stage.model.model_info import ModelInfo
from services.stage.model.packing import pack, triton_packing
from services.stage.model.row_buckets import RowPadding
from services.stage.model.shard import Shard
from services.stage.model.triton_products import TritonRmsNorm, are_covered
from shardline.job import SamplingParams
from tests.chain import generate, requests
from tests.conformance.test_architectures import BUDGET, prompts, reference
from tests.models import save_model

DEVICE = torch.device(os.environ.get("SHARDLINE_TEST_DEVICE", "cpu"))
NUM_BLOCKS, NUM_NEW = 6, 4


@torch.inference_mode()
def load(path: Path, dtype: torch.dtype) -> Forward:
    """The whole model as `Executor.load` makes it on a GPU, also where the device is the CPU."""
    info, attention = ModelInfo.read(path), Attention(TritonBackend())
    layers = range(info.num_layers)
    shard = Shard.load(info, layers, dtype=dtype, attn_implementation=attention.name, device=DEVICE)
    kv_shapes = probe_kv_shapes(shard)
    pack(shard.model, triton_packing())
    fuse_norms(shard.model, TritonRmsNorm)
    assert are_covered(shard.model)
    kv = PagedKv(layers=kv_shapes, num_blocks=NUM_BLOCKS, dtype=dtype, device=DEVICE)
    return Forward(shard, attention, kv, RowPadding(buckets=frozenset()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_its_rows_are_exact(dtype: torch.dtype, tmp_path: Path) -> None:
    forward = load(save_model(tmp_path, num_hidden_layers=1), dtype)

    assert Probe(forward.sampled_outputs, forward.random_inputs, NUM_BLOCKS).passes()


def test_its_tokens_are_those_of_generate(tmp_path: Path) -> None:
    path = save_model(tmp_path, num_hidden_layers=2)
    limits = Limits(kv_bytes=None, token_budget=BUDGET, max_open=4)
    forward = load(path, torch.float32)
    stage = Executor(forward, OffloadArea(forward.kv, 0), limits, exact=True, fingerprint="")

    found = generate(
        [stage], requests(prompts()[1:4], SamplingParams(max_tokens=NUM_NEW, temperature=0.0)), budget=BUDGET
    )

    assert found == [ids[:NUM_NEW] for ids in reference(path)[1:4]]
