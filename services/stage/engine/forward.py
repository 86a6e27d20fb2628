"""One forward of packed rows over a shard, its attention and its KV: where rows are padded, so that bits stay the same.

Knows no StepPlan, no sequence and no sampling: spans say which rows belong together and where their KV lies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import structlog
import torch
from torch import Tensor

from services.stage.attention.attention import Attention
from services.stage.attention.paged_kv import MicroBatch, PagedKv, Span
from services.stage.model.last_layer import LastLayer
from services.stage.model.row_buckets import RowPadding
from services.stage.model.shard import Shard

log = structlog.get_logger(__name__)

TRIAL_ROWS = 40
TRIAL_TOLERANCE = 16
"""Roundings of the largest value: a device without exact rows differs a little too."""


class Forward:
    """Called by one thread only: attention is told the batch before the model runs."""

    def __init__(self, shard: Shard, attention: Attention, kv: PagedKv, padding: RowPadding) -> None:
        self.shard, self.attention, self.kv, self.padding = shard, attention, kv, padding
        attention.bind(kv)
        last = LastLayer(shard.layer_modules[shard.layers.stop - 1], attention) if shard.is_last else None
        self._last = last if last is not None and self._can_narrow(last) else None

    def hidden(self, spans: Sequence[Span], x: Tensor) -> Tensor:
        """Hidden states [T, H] of all rows. `x`: their ids [T] on the first shard, else hidden states [T, H]."""
        padded, position = self._place(spans, x)
        return self.shard.hidden(padded, position)[: len(x)]

    def wanted(self, spans: Sequence[Span], x: Tensor, wanted: list[int]) -> Tensor:
        """What the shard gives for the wanted rows: logits [W, V] on the last shard, else hidden states [W, H]."""
        if not self.shard.is_last:
            return self.hidden(spans, x)[wanted]
        if self._last is not None and 2 * len(wanted) <= len(x):
            return self._narrowed(self._last, spans, x, wanted)
        return self._logits(spans, x, wanted)

    def write(self, spans: Sequence[Span], x: Tensor) -> None:
        """Keys and values of all rows: on the last shard nobody asks for more."""
        padded, position = self._place(spans, x)
        if self._last is None:
            self.shard.hidden(padded, position)
        else:
            self._last.write(lambda: self.shard.hidden(padded, position))

    def random_inputs(self, num_rows: int, generator: torch.Generator) -> Tensor:
        """Inputs for probes."""
        shape = (num_rows,)
        if self.shard.is_first:
            return torch.randint(self.shard.info.vocab_size, shape, generator=generator).to(self.shard.device)
        states = torch.randn(num_rows, self.shard.info.hidden_size, generator=generator)
        return states.to(device=self.shard.device, dtype=self.shard.dtype)

    def _logits(self, spans: Sequence[Span], x: Tensor, wanted: list[int]) -> Tensor:
        padded, position = self._place(spans, x)
        return self.shard.logits(padded, position, self._rows(wanted, x.device))[: len(wanted)]

    def _narrowed(self, last: LastLayer, spans: Sequence[Span], x: Tensor, wanted: list[int]) -> Tensor:
        """The same, with the last layer's work done for the wanted rows alone."""
        padded, position = self._place(spans, x)
        rows = self._rows(wanted, x.device)
        batch = MicroBatch.of(list(_single_rows(spans, wanted)), min_rows=len(rows), device=x.device)
        with last.narrowed(rows, batch):
            return self.shard.logits(padded, position, torch.arange(len(rows), device=x.device))[: len(wanted)]

    def _can_narrow(self, last: LastLayer) -> bool:
        """Whether a trial gives the same values. Models may do what we do not foresee around their layers."""
        x = self.random_inputs(TRIAL_ROWS, torch.Generator().manual_seed(0))
        spans, wanted = [Span(start=0, length=TRIAL_ROWS, blocks=[0])], [TRIAL_ROWS // 2, TRIAL_ROWS - 1]
        expected = self._logits(spans, x, wanted).float()
        try:
            apart = (self._narrowed(last, spans, x, wanted).float() - expected).abs().max()
        except (
            ArithmeticError,
            AssertionError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            log.info("the last layer computes every row of a prefill", reason=str(error))
            return False
        return bool(apart <= TRIAL_TOLERANCE * torch.finfo(self.shard.dtype).eps * expected.abs().max())

    def _rows(self, wanted: list[int], device: torch.device) -> Tensor:
        """Wanted rows, the last one repeated."""
        return torch.tensor(wanted + wanted[-1:] * (self.padding.padded(len(wanted)) - len(wanted)), device=device)

    def _place(self, spans: Sequence[Span], x: Tensor) -> tuple[Tensor, Tensor]:
        """Tells attention the batch; the padded input and the positions."""
        batch = MicroBatch.of(spans, min_rows=self.padding.padded(len(x)), device=x.device)
        self.attention.use(batch)
        if batch.num_rows > len(x):
            padding = x.new_zeros(batch.num_rows - len(x), *x.shape[1:])
            x = torch.cat([x, padding])
        return x, batch.position.long()


def _single_rows(spans: Sequence[Span], wanted: Sequence[int]) -> Iterator[Span]:
    """A span for each of these packed rows, which are in order."""
    left = iter(spans)
    begin, span = 0, next(left)
    for row in wanted:
        while row >= begin + span.length:
            begin, span = begin + span.length, next(left)
        yield Span(start=span.start + row - begin, length=1, blocks=span.blocks)
