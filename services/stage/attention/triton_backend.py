"""Attention on GPUs through our Triton kernels: two launches per layer. Knows tensors, no model.

Owns tile sizes and launch settings, none of which depends on a call's rows: they decide bits.

Shapes are written with the letters of `paged_kv`.
"""

from __future__ import annotations

import structlog
import torch
from torch import Tensor

from services.stage.attention.paged_kv import (
    AttentionParams,
    KvShape,
    MicroBatch,
    PackedQkv,
    PagedKv,
)
from services.stage.kernels.triton_loader import TritonKernels, unserved
from shardline_scheduler.kv_blocks import BLOCK_TOKENS

log = structlog.get_logger(__name__)

KERNELS = "services.stage.attention.triton_kernels"

MIN_DOT = 16
"""The smallest side of a matrix product that triton takes."""
LANES = {2: 64, 4: 16}
"""Lanes of a tile by the bytes of an element. A decode row fills few of them, but its time goes
into reading KV: 64 lanes in bfloat16 ask some 64 operations of each byte read, which matrix units
do in time. float32 has no such units."""
UNBOUNDED = 1 << 30
"""Tokens of a window or a chunk that has no end."""
MAX_BUFFERED_BYTES = 32 << 10
"""Keys and values of a block are fetched a block ahead up to this size; twice this fits the memory
of any program."""


class TritonBackend:
    """Launches both kernels for each layer. Used by one thread."""

    __slots__ = ("_kernels", "_kv", "_micro_batch", "version")

    def __init__(self) -> None:
        self._kernels = TritonKernels.load(KERNELS, __file__)
        self.version = self._kernels.version

    def bind(self, kv: PagedKv) -> None:
        """Makes `kv` the storage that rows are written to and read from."""
        self._kv = kv

    def use(self, micro_batch: MicroBatch) -> None:
        """Sets the rows of the next forward. Raises ProtocolError for blocks outside the KV."""
        micro_batch.check_blocks(self._kv.num_blocks)
        self._micro_batch = micro_batch

    def attend(self, layer: int, qkv: PackedQkv, params: AttentionParams) -> Tensor:
        """Writes one layer's new keys and values, then attends: returns [1, T, H, Dv] in the
        query's dtype."""
        self.write(layer, qkv, params)
        query = _dense(qkv.query)
        shape = self._kv.shapes[layer]
        micro_batch = self._micro_batch
        num_heads, num_rows = query.shape[1:3]
        group = num_heads // shape.num_kv_heads
        out = query.new_empty(1, num_rows, num_heads, shape.value_dim)
        keys = self._kv.keys[layer]
        values = self._kv.values[layer]
        self._kernels.module.attend[num_rows, shape.num_kv_heads](
            query,
            keys,
            values,
            out,
            out if params.sinks is None else params.sinks.contiguous(),
            micro_batch.sequence,
            micro_batch.position,
            micro_batch.table,
            *query.stride()[1:3],
            num_rows,
            micro_batch.table.shape[1],
            params.scale,
            params.softcap or 1.0,
            params.window or UNBOUNDED,
            params.chunk or UNBOUNDED,
            HAS_SINKS=params.sinks is not None,
            HAS_SOFTCAP=bool(params.softcap),
            IS_BOUNDED=bool(params.window or params.chunk),
            GROUP=group,
            TILE=tile_lanes(group, keys.dtype),
            IS_INTERPRETED=self._kernels.is_interpreted,
            **_constants(shape),
            **launch(shape, keys.dtype),
        )
        return out

    def write(self, layer: int, qkv: PackedQkv, _params: AttentionParams) -> None:
        """Writes one layer's new keys and values only."""
        key = _dense(qkv.key)
        value = _dense(qkv.value)
        shape = self._kv.shapes[layer]
        micro_batch = self._micro_batch
        self._kernels.module.write[micro_batch.num_rows, shape.num_kv_heads](
            key,
            value,
            self._kv.keys[layer],
            self._kv.values[layer],
            micro_batch.sequence,
            micro_batch.position,
            micro_batch.table,
            *key.stride()[1:3],
            *value.stride()[1:3],
            micro_batch.table.shape[1],
            **_constants(shape),
            num_warps=1,
        )


def load(device: torch.device) -> TritonBackend | None:
    """Returns the backend for a GPU that triton serves; otherwise logs why not, and returns None.
    None for a CPU."""
    if device.type == "cpu":
        return None
    if (reason := unserved(device)) is not None:
        log.warning("attention falls back to SDPA: rows are not exact", reason=reason)
        return None
    backend = TritonBackend()
    log.info("attention runs on triton", device=str(device), kernel=backend.version)
    return backend


def tile_lanes(group: int, dtype: torch.dtype) -> int:
    """Returns the lanes of a tile: a power of two that holds all query heads of a KV head."""
    return max(LANES[dtype.itemsize], _padded(group))


def launch(shape: KvShape, dtype: torch.dtype) -> dict[str, int]:
    """Returns how a program runs, for KV of this dtype."""
    block_bytes = (
        BLOCK_TOKENS * (_padded(shape.head_dim) + _padded(shape.value_dim)) * dtype.itemsize
    )
    return {"num_warps": 4, "num_stages": 2 if block_bytes <= MAX_BUFFERED_BYTES else 1}


def _constants(shape: KvShape) -> dict[str, int]:
    return {
        "KV_HEADS": shape.num_kv_heads,
        "BLOCK": BLOCK_TOKENS,
        "DIM": shape.head_dim,
        "VALUE_DIM": shape.value_dim,
        "STORED_VALUE_DIM": shape.padded_value_dim,
        "PADDED_DIM": _padded(shape.head_dim),
        "PADDED_VALUE_DIM": _padded(shape.value_dim),
    }


def _padded(size: int) -> int:
    """The next power of two that a matrix product takes."""
    return max(MIN_DOT, 1 << (size - 1).bit_length())


def _dense(tensor: Tensor) -> Tensor:
    """Makes the last dimension dense; the kernels read any other strides."""
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()
