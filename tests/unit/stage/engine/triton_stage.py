"""A whole model over our Triton kernels, interpreted, or compiled on the device that
SHARDLINE_TEST_DEVICE names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from services.stage.adapters.lora import ShardAdapters
from services.stage.adapters.peft import AdapterFolder
from services.stage.attention.attention import Attention, PagedKv
from services.stage.attention.offload_area import OffloadArea
from services.stage.attention.triton_backend import TritonBackend
from services.stage.device.acquire import acquire
from services.stage.engine.adapter_pool import AdapterPool
from services.stage.engine.executor import Executor
from services.stage.engine.forward import Forward
from services.stage.engine.memory import Limits
from services.stage.engine.shard_runner import ShardRunner
from services.stage.model.kv_shapes import probe_kv_shapes
from services.stage.model.model_info import ModelInfo
from services.stage.model.shard import Shard
from services.stage.products.fused import fuse
from services.stage.products.packing import pack, triton_packing
from services.stage.products.row_buckets import RowPadding
from services.stage.products.triton_products import TritonParts, are_covered
from tests.conformance.test_architectures import BUDGET
from tests.pinned import unpinned_afterwards

DEVICE = torch.device(os.environ.get("SHARDLINE_TEST_DEVICE", "cpu"))
NUM_BLOCKS = 6


@torch.inference_mode()
def load_forward(path: Path, dtype: torch.dtype) -> Forward:
    """As `Executor.load` makes it on a GPU, also where the device is the CPU."""
    info = ModelInfo.read(path)
    attention = Attention(TritonBackend())
    layers = range(info.num_layers)
    shard = Shard.load(info, layers, dtype=dtype, attn_implementation=attention.name, device=DEVICE)
    kv_shapes = probe_kv_shapes(shard)
    pack(shard.model, triton_packing())
    fuse(shard.model, TritonParts(DEVICE))
    assert are_covered(shard.model)
    kv = PagedKv(layers=kv_shapes, num_blocks=NUM_BLOCKS, dtype=dtype, device=DEVICE)
    return Forward(shard, attention, kv, RowPadding(buckets=frozenset()))


@contextmanager
def stage_of(forward: Forward, lock_folder: Path) -> Iterator[Executor]:
    """A stage of few sequences, while entered."""
    limits = Limits(kv_bytes=None, token_budget=BUDGET, max_open=8)
    with unpinned_afterwards():
        device = acquire(str(DEVICE), worker="tests", lock_folder=lock_folder)
        folder = AdapterFolder(None, forward.shard.linear_sizes, lock_folder)
        adapters = ShardAdapters(forward.shard, triton_packing())
        runner = ShardRunner(forward, OffloadArea(forward.kv, 0), adapters)
        pool = AdapterPool(runner, folder, max_adapters=1)
        yield Executor(runner, limits, device, pool, exact=True, fingerprint="")
        device.release()
