"""Attention through our kernel, on CPU: one foreign call per layer. Knows tensors and the call's fields, no model."""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from services.stage.attention.paged_kv import AttentionParams, MicroBatch, PackedQkv, PagedKv
from services.stage.kernels.kernel import DTYPES, AttentionCall, Kernel
from shardline.errors import ProtocolError


class KernelBackend:
    """Keeps one call per layer and changes only what differs from step to step."""

    __slots__ = ("_batch", "_calls", "_kernel", "_kv")

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._calls: dict[int, AttentionCall] = {}

    def bind(self, kv: PagedKv) -> None:
        """From now on rows are written to and read from `kv`."""
        self._kv = kv
        self._calls = {
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

    def use(self, batch: MicroBatch) -> None:
        """The next rows."""
        self._batch = batch  # keeps the memory alive that the calls point to
        places = (batch.sequence.data_ptr(), batch.position.data_ptr(), batch.table.data_ptr())
        sizes = (batch.num_rows, *batch.table.shape, torch.get_num_threads())
        for call in self._calls.values():
            call.sequence, call.position, call.table = places
            call.num_rows, call.num_sequences, call.table_width, call.num_threads = sizes

    def attend(self, layer: int, rows: PackedQkv, rule: AttentionParams) -> Tensor:
        """One layer. The kernel checks every index before it touches memory."""
        dtype, value_dim = self._kv.dtype, self._calls[layer].value_dim
        num_heads, num_rows = rows.query.shape[1:3]
        out = torch.empty(1, num_rows, num_heads, value_dim, dtype=dtype)
        self._run(layer, rows, rule, out)
        return out if rows.query.dtype == dtype else out.to(rows.query.dtype)

    def write(self, layer: int, rows: PackedQkv, rule: AttentionParams) -> None:
        """Only the keys and values."""
        self._run(layer, rows, rule, None)

    def _run(self, layer: int, rows: PackedQkv, rule: AttentionParams, out: Tensor | None) -> None:
        call, dtype = self._calls[layer], self._kv.dtype
        num_heads, num_rows = rows.query.shape[1:3]
        key_shape = (1, call.num_kv_heads, call.num_rows, call.dim)
        assert num_rows == call.num_rows, f"{num_rows} query rows in a batch of {call.num_rows}"
        assert rows.query.shape[3] == call.dim, f"query of layer {layer}: {tuple(rows.query.shape)}"
        assert rows.key.shape == key_shape, f"key of layer {layer}: {tuple(rows.key.shape)}, expected {key_shape}"
        assert rows.value.shape == (*key_shape[:3], call.value_dim), f"value of layer {layer}: {rows.value.shape}"
        query, key, value = _dense(rows.query, dtype), _dense(rows.key, dtype), _dense(rows.value, dtype)
        sinks = None if rule.sinks is None else rule.sinks.float().contiguous()
        call.query, call.key, call.value = query.data_ptr(), key.data_ptr(), value.data_ptr()
        call.out = None if out is None else out.data_ptr()
        call.query_strides, call.key_strides, call.value_strides = (t.stride()[1:3] for t in (query, key, value))
        call.sinks = None if sinks is None else sinks.data_ptr()
        call.num_heads, call.scale = num_heads, rule.scale
        call.window, call.softcap = rule.window or 0, rule.softcap or 0.0
        if (status := self._kernel.attend(byref(call))) != 0:
            raise self._refusal(status)

    def _refusal(self, status: int) -> ProtocolError:
        assert status > 0, "the kernel was called with shapes that cannot be"
        row, batch = status - 1, self._batch
        return ProtocolError(
            f"packed row {row}: sequence {int(batch.sequence[row])}, position {int(batch.position[row])} lies outside"
            f" the block table {tuple(batch.table.shape)}, or its table outside {self._kv.num_blocks} KV blocks"
        )


def _dense(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The kernel reads any strides but the head dimension's."""
    if tensor.dtype != dtype:
        tensor = tensor.to(dtype)
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()
