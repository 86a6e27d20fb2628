"""Attention through our kernel, on CPU: one foreign call per layer. Knows tensors and the call's
fields, no model.

Shapes are written with the letters of `paged_kv`.
"""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from services.stage.attention.paged_kv import AttentionParams, MicroBatch, PackedQkv, PagedKv
from services.stage.kernels.kernel import DTYPES, AttentionCall, Kernel
from shardline.base.errors import ProtocolError


class KernelBackend:
    """Keeps one call structure per layer and changes only the fields that differ from step to
    step."""

    __slots__ = ("_kernel", "_kv", "_micro_batch", "calls")

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.calls: dict[int, AttentionCall] = {}
        """By layer, as they were made last."""

    def bind(self, kv: PagedKv) -> None:
        """Makes `kv` the storage that rows are written to and read from."""
        self._kv = kv
        self.calls = {
            layer: AttentionCall(
                keys=kv.keys[layer].data_ptr(),
                values=kv.values[layer].data_ptr(),
                num_blocks=kv.num_blocks,
                num_kv_heads=shape.num_kv_heads,
                dim=shape.head_dim,
                value_dim=shape.value_dim,
                dtype=DTYPES[kv.dtype],
            )
            for layer, shape in kv.shapes.items()
        }

    def use(self, micro_batch: MicroBatch) -> None:
        """Sets the rows of the next forward. The kernel checks them in `attend` and `write`."""
        self._micro_batch = micro_batch  # keeps the memory alive that the calls point to
        pointers = (
            micro_batch.sequence.data_ptr(),
            micro_batch.position.data_ptr(),
            micro_batch.table.data_ptr(),
        )
        sizes = (micro_batch.num_rows, *micro_batch.table.shape, torch.get_num_threads())
        for call in self.calls.values():
            call.sequence, call.position, call.table = pointers
            call.num_rows, call.num_sequences, call.table_width, call.num_threads = sizes

    def attend(self, layer: int, qkv: PackedQkv, params: AttentionParams) -> Tensor:
        """Writes one layer's new keys and values, then attends: returns [1, T, H, Dv] in the
        query's dtype.

        Raises ProtocolError for rows that point outside the KV; the kernel checks every index
        before it writes.
        """
        dtype = self._kv.dtype
        value_dim = self.calls[layer].value_dim
        num_heads, num_rows = qkv.query.shape[1:3]
        out = torch.empty(1, num_rows, num_heads, value_dim, dtype=dtype)
        self._run(layer, qkv, params, out)
        return out if qkv.query.dtype == dtype else out.to(qkv.query.dtype)

    def write(self, layer: int, qkv: PackedQkv, params: AttentionParams) -> None:
        """Writes one layer's new keys and values only. Raises ProtocolError as `attend` does."""
        self._run(layer, qkv, params, None)

    def _run(self, layer: int, qkv: PackedQkv, params: AttentionParams, out: Tensor | None) -> None:
        call = self.calls[layer]
        dtype = self._kv.dtype
        num_heads, num_rows = qkv.query.shape[1:3]
        key_shape = (1, call.num_kv_heads, call.num_rows, call.dim)
        assert num_rows == call.num_rows, (
            f"{num_rows} query rows in a micro-batch of {call.num_rows}"
        )
        assert qkv.query.shape[3] == call.dim, f"query of layer {layer}: {tuple(qkv.query.shape)}"
        assert qkv.key.shape == key_shape, (
            f"key of layer {layer}: {tuple(qkv.key.shape)}, expected {key_shape}"
        )
        assert qkv.value.shape == (*key_shape[:3], call.value_dim), (
            f"value of layer {layer}: {qkv.value.shape}"
        )
        query = _dense(qkv.query, dtype)
        key = _dense(qkv.key, dtype)
        value = _dense(qkv.value, dtype)
        sinks = None if params.sinks is None else params.sinks.float().contiguous()
        call.query = query.data_ptr()
        call.key = key.data_ptr()
        call.value = value.data_ptr()
        call.out = None if out is None else out.data_ptr()
        call.query_strides, call.key_strides, call.value_strides = (
            t.stride()[1:3] for t in (query, key, value)
        )
        call.sinks = None if sinks is None else sinks.data_ptr()
        bias = params.distance_bias
        call.bias = None if bias is None else bias.table.data_ptr()
        call.bias_reach = 0 if bias is None else bias.reach
        call.num_heads = num_heads
        call.scale = params.scale
        call.window = params.window or 0
        call.chunk = params.chunk or 0
        call.both_ways = params.both_ways
        call.softcap = params.softcap or 0.0
        if (status := self._kernel.attend(byref(call))) != 0:
            raise self.refusal(status)

    def refusal(self, status: int) -> ProtocolError:
        """Returns the error for a status of the kernel that is not 0, which names the row."""
        assert status > 0, "the kernel was called with invalid shapes"
        row = status - 1
        micro_batch = self._micro_batch
        return ProtocolError(
            f"packed row {row}: sequence {int(micro_batch.sequence[row])}, "
            f"position {int(micro_batch.position[row])} lies outside "
            f"the block table {tuple(micro_batch.table.shape)}, "
            f"or its table outside {self._kv.num_blocks} KV blocks"
        )


def _dense(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts to the KV's dtype and makes the last dimension dense; the kernel reads any other
    strides."""
    if tensor.dtype != dtype:
        tensor = tensor.to(dtype)
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()
