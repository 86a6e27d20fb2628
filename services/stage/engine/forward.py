"""One forward of packed rows over a shard, its attention and its KV: where rows are padded, so that
bits stay the same.

Knows no StepPlan, no sequence and no sampling: spans tell which rows belong together and where
their KV lies.

Letters of shapes: T packed rows, H the hidden size, R sampled rows, V the vocabulary. An input `x`
holds ids int64 [T] on the first shard, and hidden states [T, H] in the shard's dtype on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import structlog
import torch
from torch import Tensor

from services.stage.attention.attention import Attention
from services.stage.attention.paged_kv import MicroBatch, PagedKv, Span
from services.stage.engine.step_graphs import Recorder, StepGraph, StepGraphs
from services.stage.kernels.kernel import Kernel
from services.stage.model.encoders.encoder_class import is_encoder
from services.stage.model.fused_layer import MixedLayer, fuse_layers
from services.stage.model.last_layer import LastLayer, Narrow
from services.stage.model.shard import Shard
from services.stage.products.row_buckets import RowPadding
from services.stage.ranks.group import RankGroup
from services.stage.recurrent.states import RecurrentStates

log = structlog.get_logger(__name__)

TRIAL_ROWS = 40
TRIAL_FIRST = 8
"""Of these at the first positions; the others lie over the whole context."""
TRIAL_TOLERANCE = 16
"""The largest difference accepted in a trial, in roundings of the largest value: inexact devices
differ a little."""


class Forward:
    """Runs packed rows through a shard. Used by one thread: attention gets the micro-batch before
    the model runs."""

    def __init__(
        self,
        shard: Shard,
        attention: Attention,
        kv: PagedKv,
        padding: RowPadding,
        states: RecurrentStates | None = None,
    ) -> None:
        """`states` are needed by a shard with recurrent layers."""
        self.shard = shard
        self.states = states
        if states is not None:
            shard.recurrence.bind(states)
        self.attention = attention
        self.kv = kv
        self.padding = padding
        attention.bind(kv)
        self._narrow_adapters: Narrow | None = None
        """Of the adapters that add to the rows of this step."""
        self._trial_position: Tensor | None = None
        """In a trial: where the model believes its rows to be, int64 [TRIAL_ROWS]."""
        last = (
            LastLayer(shard.layer_modules[shard.layers.stop - 1], attention)
            if shard.is_last and not is_encoder(shard.info.config)
            else None
        )
        self._last = last if last is not None and self._can_narrow(last) else None
        self._graphs: StepGraphs | None = None
        self.num_fused = 0
        """Layers that are one call of the kernel."""

    @property
    def is_recurrent(self) -> bool:
        """Whether a layer keeps more than keys and values."""
        return bool(self.shard.recurrence.shapes)

    def fuse_layers(self, kernel: Kernel, group: RankGroup | None = None) -> int:
        """Makes one call of each layer that the kernel knows as a whole, after a trial; returns how
        many these are.

        If these are all, torch computes no function between products any more, and rows need no
        padding for it. Uses the first KV block: no sequence may be open. `group` has the ranks
        that compute the layers together.
        """
        x = self.random_inputs(TRIAL_ROWS, torch.Generator().manual_seed(0))
        spans = [Span(start=0, length=TRIAL_ROWS, blocks=[0], state=0)]
        layers = self.shard.layer_modules.values()
        trial = partial(self.hidden, spans, x)
        with self._over_the_context():
            fused = fuse_layers(layers, kernel, self.attention, trial, group)
        num_mixed = sum(isinstance(one, MixedLayer) for one in fused.values())
        self.num_fused = len(fused) - num_mixed
        log.info(
            "layers as one call",
            fused=self.num_fused,
            behind_mixers=num_mixed,
            layers=len(layers),
        )
        # An encoder's pooler applies tanh.
        if self.num_fused == len(layers) and not is_encoder(self.shard.info.config):
            self.padding = replace(self.padding, widths=frozenset())
        return self.num_fused

    def record_steps(self, recorder: Recorder, *, max_rows: int, max_sampled: int) -> None:
        """Replays steps of up to `max_rows` rows from now on, of which the last shard samples up to
        `max_sampled`. The shard's modules must not change any more.

        Raises Invalid if the model's forward cannot be recorded.
        """
        self._graphs = StepGraphs(
            self.shard,
            self.attention,
            self.kv,
            recorder,
            max_rows=max_rows,
            max_sampled=max_sampled,
        )

    def recorded(
        self, recorder: Recorder, spans: Sequence[Span], x: Tensor
    ) -> Callable[[], Tensor]:
        """Records one pass over all rows with the layers that the shard has now; returns its
        replay, which gives the hidden states [T, H] in the shard's dtype. `x` is an input, [T] or
        [T, H]."""
        micro_batch = MicroBatch.of(spans)
        graph = StepGraph(
            self.shard,
            self.attention,
            recorder,
            num_rows=len(x),
            max_sampled=0,
            table_width=micro_batch.table.shape[1],
        )
        return partial(graph.run, micro_batch, x, ())

    @contextmanager
    def adapted(self, narrow: Narrow) -> Iterator[None]:
        """A context in which adapters add to rows: graphs, which know none, are not replayed;
        `narrow` receives the rows that the last layer goes on with, int64 [R]."""
        self._narrow_adapters = narrow
        try:
            yield
        finally:
            self._narrow_adapters = None

    def hidden(self, spans: Sequence[Span], x: Tensor) -> Tensor:
        """Returns the hidden states [T, H] of all rows in the shard's dtype; `x` is an input, [T]
        or [T, H].

        Raises ProtocolError for spans that point outside the KV.
        """
        if not self.shard.is_last and (replayed := self._replayed(spans, x, ())) is not None:
            return replayed
        padded, position = self._pad(spans, x)
        return self.shard.hidden(padded, position)[: len(x)]

    def sampled_outputs(self, spans: Sequence[Span], x: Tensor, sampled_rows: list[int]) -> Tensor:
        """Returns the outputs of the sampled rows: logits [R, V] on the last shard, hidden states
        [R, H] on the others.

        Logits have the dtype that the model gives them, hidden states the shard's. `x`, [T] or [T,
        H], holds all rows. Raises ProtocolError for spans that point outside the KV.
        """
        if not self.shard.is_last:
            return self.hidden(spans, x)[sampled_rows]
        if (replayed := self._replayed(spans, x, sampled_rows)) is not None:
            return replayed
        if self._last is not None and 2 * len(sampled_rows) <= len(x):
            return self._narrowed(self._last, spans, x, sampled_rows)
        return self._logits(spans, x, sampled_rows)

    def write(self, spans: Sequence[Span], x: Tensor) -> None:
        """Writes the keys and values of all rows `x`, ids int64 [T] or hidden states [T, H], and
        computes little else.

        This is for a step of the last shard that samples nothing. Raises ProtocolError for spans
        that point outside the KV.
        """
        if self._replayed(spans, x, ()) is not None:
            return
        padded, position = self._pad(spans, x)
        if self._last is None:
            self.shard.hidden(padded, position)
        else:
            self._last.write(lambda: self.shard.hidden(padded, position))

    def random_inputs(self, num_rows: int, generator: torch.Generator) -> Tensor:
        """Returns random inputs for probes: ids int64 [T] on the first shard, else hidden states
        [T, H] in its dtype.

        `generator` is one of the CPU.
        """
        shape = (num_rows,)
        if self.shard.is_first:
            return torch.randint(self.shard.info.vocab_size, shape, generator=generator).to(
                self.shard.device
            )
        states = torch.randn(num_rows, self.shard.info.hidden_size, generator=generator)
        return states.to(device=self.shard.device, dtype=self.shard.dtype)

    def _replayed(
        self, spans: Sequence[Span], x: Tensor, sampled_rows: Sequence[int]
    ) -> Tensor | None:
        """The outputs of the sampled rows on the last shard, else of all, if a graph has them."""
        return (
            None
            if self._graphs is None or self._narrow_adapters is not None
            else self._graphs.outputs(spans, x, sampled_rows)
        )

    def _logits(self, spans: Sequence[Span], x: Tensor, sampled_rows: list[int]) -> Tensor:
        padded, position = self._pad(spans, x)
        return self.shard.logits(padded, position, self._padded_rows(sampled_rows, x.device))[
            : len(sampled_rows)
        ]

    def _narrowed(
        self, last: LastLayer, spans: Sequence[Span], x: Tensor, sampled_rows: list[int]
    ) -> Tensor:
        """Does what `_logits` does, but the last layer computes the sampled rows only."""
        padded, position = self._pad(spans, x)
        rows = self._padded_rows(sampled_rows, x.device)
        micro_batch = MicroBatch.of(
            list(_single_rows(spans, sampled_rows)), min_rows=len(rows), device=x.device
        )
        with last.narrowed(rows, micro_batch, self._narrow_adapters):
            return self.shard.logits(padded, position, torch.arange(len(rows), device=x.device))[
                : len(sampled_rows)
            ]

    def _can_narrow(self, last: LastLayer) -> bool:
        """Whether a trial gives the same values: a model may do anything around its layers."""
        if self.shard.layers.stop - 1 in self.shard.recurrence.shapes:
            return False  # Its state needs every row.
        x = self.random_inputs(TRIAL_ROWS, torch.Generator().manual_seed(0))
        spans = [Span(start=0, length=TRIAL_ROWS, blocks=[0], state=0)]
        sampled_rows = [TRIAL_ROWS // 2, TRIAL_ROWS - 1]
        with self._over_the_context():
            expected = self._logits(spans, x, sampled_rows).float()
            try:
                apart = (
                    (self._narrowed(last, spans, x, sampled_rows).float() - expected).abs().max()
                )
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
        return bool(
            apart <= TRIAL_TOLERANCE * torch.finfo(self.shard.dtype).eps * expected.abs().max()
        )

    @contextmanager
    def _over_the_context(self) -> Iterator[None]:
        """A context in which the model gets positions over all of its context, for the TRIAL_ROWS
        rows of a trial: a layer may scale by its position what it does not scale near 0. Attention
        and KV are those of a short sequence."""
        last = self.shard.info.context_length - 1
        spread = torch.linspace(
            min(TRIAL_FIRST, last), last, TRIAL_ROWS - TRIAL_FIRST, dtype=torch.float64
        ).long()
        position = torch.cat([torch.arange(TRIAL_FIRST).clamp(max=last), spread])
        self._trial_position = position.to(self.shard.device)
        try:
            yield
        finally:
            self._trial_position = None

    def _padded_rows(self, rows: list[int], device: torch.device) -> Tensor:
        """The rows as int64 [padded], the last one repeated."""
        return torch.tensor(
            rows + rows[-1:] * (self.padding.padded(len(rows)) - len(rows)), device=device
        )

    def _pad(self, spans: Sequence[Span], x: Tensor) -> tuple[Tensor, Tensor]:
        """Gives attention the micro-batch; returns the padded input and the positions, int64
        [padded]."""
        micro_batch = MicroBatch.of(spans, min_rows=self.padding.padded(len(x)), device=x.device)
        self.attention.use(micro_batch)
        self.shard.recurrence.use(micro_batch)
        if micro_batch.num_rows > len(x):
            padding = x.new_zeros(micro_batch.num_rows - len(x), *x.shape[1:])
            x = torch.cat([x, padding])
        position = micro_batch.position.long()
        if self._trial_position is not None:
            position = torch.cat([self._trial_position, position[len(self._trial_position) :]])
        return x, position


def _single_rows(spans: Sequence[Span], rows: Sequence[int]) -> Iterator[Span]:
    """Yields a span of one token for each of these packed rows, which are in ascending order."""
    left = iter(spans)
    begin = 0
    span = next(left)
    for row in rows:
        while row >= begin + span.length:
            begin = begin + span.length
            span = next(left)
        yield Span(start=span.start + row - begin, length=1, blocks=span.blocks)
