"""The tail's last layer: of rows whose logits nobody wants it computes keys and values only, which is all that later
rows need of them. A prompt's prefill saves most of one layer. Knows no sequence and no sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from services.stage.attention.attention import Attention, KvWritten, MicroBatch


class LastLayer:
    """Works for any layer that attends once, through `attention`, and treats rows alike otherwise."""

    def __init__(self, layer: nn.Module, attention: Attention) -> None:
        self._attention = attention
        self._wanted: tuple[Tensor, MicroBatch] | None = None
        self._ends = False
        layer.register_forward_pre_hook(self._narrow, with_kwargs=True)

    @contextmanager
    def narrowed(self, rows: Tensor, batch: MicroBatch) -> Iterator[None]:
        """From the last layer on, forwards within go on with these rows [W] only, which `batch` describes."""
        self._wanted = (rows, batch)
        try:
            yield
        finally:
            self._wanted = None

    def write(self, forward: Callable[[], object]) -> None:
        """Runs a forward until the last layer has written its keys and values."""
        self._ends = True
        try:
            forward()
        except KvWritten:
            return
        finally:
            self._ends = False
        raise AssertionError("the last layer was never called")

    def _narrow(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        if self._wanted is None and not self._ends:
            return None
        self._write_kv(layer, args, kwargs)
        if self._wanted is None:
            raise KvWritten
        rows, batch = self._wanted
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        self._attention.use(batch)
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
    """The same arguments for some of the rows: every tensor [1, T, …] in them, however deep."""
    if isinstance(value, Tensor):
        return value.index_select(1, rows) if value.dim() > 1 and value.shape[1] == num_rows else value
    if isinstance(value, dict):
        return {name: _rows_of(part, rows, num_rows) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_rows_of(part, rows, num_rows) for part in value)
    return value
