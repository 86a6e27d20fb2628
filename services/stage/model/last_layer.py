"""Narrows the tail's last layer: rows that are not sampled get keys and values only, all that later
rows need of them.

The prefill of a prompt saves most of one layer. Knows no sequence and no sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from services.stage.attention.attention import Attention, KvWritten, MicroBatch

Narrow = Callable[[Tensor], None]
"""Gets the packed rows with which a forward goes on, int64 [R]."""


class LastLayer:
    """The last layer of a shard: one that attends once, through `attention`, and else treats rows
    independently."""

    def __init__(self, layer: nn.Module, attention: Attention) -> None:
        self._attention = attention
        self._kept: tuple[Tensor, MicroBatch, Narrow | None] | None = None
        self._ends_after_kv = False
        layer.register_forward_pre_hook(self._narrow, with_kwargs=True)

    @contextmanager
    def narrowed(
        self, rows: Tensor, micro_batch: MicroBatch, narrow: Narrow | None = None
    ) -> Iterator[None]:
        """A context in which forwards go on, from the last layer, with the packed rows `rows` only,
        int64 [R].

        `micro_batch` describes these R rows; `narrow` receives them when all that follows computes
        them alone.
        """
        self._kept = (rows, micro_batch, narrow)
        try:
            yield
        finally:
            self._kept = None

    def write(self, forward: Callable[[], object]) -> None:
        """Runs `forward` until the last layer has written its keys and values.

        Raises AssertionError if it never calls the last layer.
        """
        self._ends_after_kv = True
        try:
            forward()
        except KvWritten:
            return
        finally:
            self._ends_after_kv = False
        raise AssertionError("the last layer was never called")

    def _narrow(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        if self._kept is None and not self._ends_after_kv:
            return None
        self._write_kv(layer, args, kwargs)
        if self._kept is None:
            raise KvWritten
        rows, micro_batch, narrow = self._kept
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        self._attention.use(micro_batch)
        if narrow is not None:
            narrow(rows)
        narrow_args, narrow_kwargs = _rows_of((args, kwargs), rows, hidden.shape[1])
        return narrow_args, narrow_kwargs

    def _write_kv(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._attention.only_writes = True
        try:
            layer.forward(*args, **kwargs)
        except KvWritten:
            return
        finally:
            self._attention.only_writes = False
        raise AssertionError(f"{type(layer).__name__} has no attention")


def _rows_of(value: Any, rows: Tensor, num_rows: int) -> Any:
    """Returns the arguments for some of the rows: selects `rows` in every tensor [1, T, ...],
    however deeply nested."""
    if isinstance(value, Tensor):
        return (
            value.index_select(1, rows) if value.dim() > 1 and value.shape[1] == num_rows else value
        )
    if isinstance(value, dict):
        return {name: _rows_of(part, rows, num_rows) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_rows_of(part, rows, num_rows) for part in value)
    return value
