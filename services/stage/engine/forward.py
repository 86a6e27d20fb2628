"""One forward of packed rows over a shard, its attention and its KV: where rows are padded, so that bits stay the same.

Knows no StepPlan, no sequence and no sampling: spans say which rows belong together and where their KV lies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.stage.engine.attention import Attention
from services.stage.engine.padding import padded_rows
from services.stage.engine.paged import Batch, PagedKv, Span
from services.stage.engine.shard import Shard


class Forward:
    """Called by one thread only: attention is told the batch before the model runs."""

    def __init__(self, shard: Shard, attention: Attention, kv: PagedKv, *, min_rows: int) -> None:
        self.shard, self.attention, self.kv, self.min_rows = shard, attention, kv, min_rows
        self._widths = shard.widths
        self._num_threads = torch.get_num_threads()
        attention.bind(kv)

    def hidden(self, spans: Sequence[Span], x: Tensor) -> Tensor:
        """Hidden states [T, H] of all rows. `x`: their ids [T] on the first shard, else hidden states [T, H]."""
        padded, position = self._place(spans, x)
        return self.shard.hidden(padded, position)[: len(x)]

    def wanted(self, spans: Sequence[Span], x: Tensor, wanted: list[int]) -> Tensor:
        """What the shard gives for the wanted rows: logits [W, V] on the last shard, else hidden states [W, H]."""
        if not self.shard.is_last:
            return self.hidden(spans, x)[wanted]
        padded, position = self._place(spans, x)
        rows = wanted + wanted[-1:] * (self.min_rows - len(wanted))
        return self.shard.logits(padded, position, torch.tensor(rows, device=x.device))[: len(wanted)]

    def random_inputs(self, num_rows: int, generator: torch.Generator) -> Tensor:
        """Inputs for probes."""
        shape = (num_rows,)
        if self.shard.is_first:
            return torch.randint(self.shard.info.vocab_size, shape, generator=generator).to(self.shard.device)
        states = torch.randn(num_rows, self.shard.info.hidden_size, generator=generator)
        return states.to(device=self.shard.device, dtype=self.shard.dtype)

    def _place(self, spans: Sequence[Span], x: Tensor) -> tuple[Tensor, Tensor]:
        """Tells attention the batch; the padded input and the positions."""
        num_rows = padded_rows(len(x), min_rows=self.min_rows, widths=self._widths, num_threads=self._num_threads)
        batch = Batch.of(spans, min_rows=num_rows, device=x.device)
        self.attention.use(batch)
        if batch.num_rows > len(x):
            padding = x.new_zeros(batch.num_rows - len(x), *x.shape[1:])
            x = torch.cat([x, padding])
        return x, batch.position.long()
