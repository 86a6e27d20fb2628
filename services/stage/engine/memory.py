"""How a stage's memory is shared out between weights and KV. Knows sizes only."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from services.stage.engine.device import Device
from services.stage.engine.kv_cache import blocks_for
from services.stage.engine.paged import HeadShape, PagedKv
from shardline.errors import Invalid

PACKING_FACTOR = 1.05
"""While linears are packed, the largest exists twice."""

DEFAULT_KV_SHARE = 0.4
"""Of the memory that is free once the shard is loaded."""


def check_fits(shard_bytes: int, kv_bytes: int | None, device: Device) -> None:
    """Before any weight is read. Raises Invalid when shard and KV cannot fit into what is free."""
    kv_bytes = kv_bytes or 0
    needed, available = int(shard_bytes * PACKING_FACTOR) + kv_bytes, device.available_bytes()
    if needed > available:
        raise Invalid(
            "SHARDLINE_SPLIT",
            f"weights ({mib(shard_bytes)}) and KV ({mib(kv_bytes)}) need {mib(needed)}, {mib(available)} are free",
            "Use more stages, fewer layers here, a smaller dtype or a smaller SHARDLINE_KV_MIB",
        )


def num_blocks(
    heads: Mapping[int, HeadShape],
    dtype: torch.dtype,
    kv_bytes: int | None,
    *,
    context: int,
    max_open: int,
    device: Device,
) -> int:
    """KV blocks that the budget holds; never more than all open sequences could use at full length."""
    block_bytes = PagedKv.bytes_per_block(heads, dtype)
    if kv_bytes is None:
        kv_bytes = int(device.available_bytes() * DEFAULT_KV_SHARE)
    if kv_bytes < block_bytes:
        raise Invalid("SHARDLINE_KV_MIB", f"{mib(kv_bytes)} hold no KV block of {mib(block_bytes)}", "Give more memory")
    return min(kv_bytes // block_bytes, max_open * blocks_for(context))


def mib(num_bytes: int) -> str:
    """For people."""
    return f"{num_bytes / 2**20:,.1f} MiB"
