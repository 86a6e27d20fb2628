"""Steps as graphs: recorded once for a few numbers of rows, then replayed, which costs the host one
call.

Attention reads each row's sequence and position from memory, so one graph holds decodes, chunks of
prompts, and both together. Owns the numbers of rows and the buffers that a graph reads: every step
is copied into these, and padded. Knows no StepPlan and no sampling.

Letters of shapes: T packed rows of a step, R rows of a graph, S sampled rows of a step, H the
hidden size, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from services.stage.attention.attention import Attention
from services.stage.attention.paged_kv import NO_BLOCK, NO_SEQUENCE, MicroBatch, PagedKv, Span
from services.stage.model.shard import Shard
from shardline.base.errors import Invalid
from shardline_scheduler.kv_blocks import blocks_for

FIELD = "SHARDLINE_CUDA_GRAPHS"
WARM_UPS = 2
"""Runs before a recording: kernels are compiled and libraries get their workspaces."""
FINE_ROWS = 64
"""Above it there are two graphs for each doubling of rows: at most a third of a step is padding."""


class Recorder(Protocol):
    """Records what a function does to memory."""

    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Runs `run`, which gives a tensor [R, ...] of any dtype, some times; returns what does the
        same again.

        Both read and write the same memory each time, the result's included: the caller keeps all
        that `run` reads. Raises Invalid if it cannot be recorded.
        """


class CudaRecorder:
    """Records CUDA graphs, all in one memory pool: no two of them run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Records kernels of the current device that give a tensor [R, ...] of any dtype; returns
        their replay."""
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        try:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    run()
            torch.cuda.current_stream().wait_stream(stream)
            # Other threads of the process may use the device meanwhile
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                out = run()
        except RuntimeError as error:
            problem = f"a step of this model cannot be recorded: {error}"
            raise Invalid(FIELD, problem, "Set it to false") from error

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


class StepGraphs:
    """The graphs of one stage. Used by one thread."""

    def __init__(
        self,
        shard: Shard,
        attention: Attention,
        kv: PagedKv,
        recorder: Recorder,
        *,
        max_rows: int,
        max_sampled: int,
    ) -> None:
        """Records steps of up to `max_rows` rows, of which the last shard samples up to
        `max_sampled`. The recordings write to no KV block."""
        self._num_blocks = kv.num_blocks
        self._table_width = min(blocks_for(shard.info.context_length), kv.num_blocks)
        # The largest first: the others find memory in the pool that it has left
        self._graphs = [
            StepGraph(
                shard,
                attention,
                recorder,
                num_rows=num_rows,
                max_sampled=min(num_rows, max_sampled) if shard.is_last else 0,
                table_width=self._table_width,
            )
            for num_rows in reversed(graph_sizes(max_rows))
        ][::-1]

    def outputs(
        self, spans: Sequence[Span], x: Tensor, sampled_rows: Sequence[int]
    ) -> Tensor | None:
        """Returns the outputs of a step, in separate memory; None if it is too large for the
        graphs.

        `x` holds ids int64 [T] on the first shard, else hidden states [T, H] in the shard's dtype.
        Outputs are the logits [S, V] of the sampled rows on the last shard, in the dtype that the
        model gives them, else hidden states [T, H]. Raises ProtocolError for spans that point
        outside the KV.
        """
        if any(blocks_for(span.start + span.length) > self._table_width for span in spans):
            return None
        graph = next((each for each in self._graphs if each.holds(len(x), len(sampled_rows))), None)
        if graph is None:
            return None
        micro_batch = MicroBatch.of(spans, min_rows=graph.num_rows)
        micro_batch.check_blocks(self._num_blocks)
        return graph.run(micro_batch, x, sampled_rows)


class StepGraph:
    """A step of `num_rows` rows. Rows that a step leaves over belong to no sequence, as padding
    rows do."""

    def __init__(
        self,
        shard: Shard,
        attention: Attention,
        recorder: Recorder,
        *,
        num_rows: int,
        max_sampled: int,
        table_width: int,
    ) -> None:
        """Records it over its own buffers. Without sampled rows it gives hidden states."""
        self.num_rows = num_rows
        self._samples = max_sampled > 0
        self._x = shard.zeros(num_rows)
        self._rows = MicroBatch(
            sequence=torch.full((num_rows,), NO_SEQUENCE, dtype=torch.int32, device=shard.device),
            position=torch.zeros(num_rows, dtype=torch.int32, device=shard.device),
            table=torch.full(
                (num_rows, table_width), NO_BLOCK, dtype=torch.int32, device=shard.device
            ),
            spans=(),
        )
        self._sampled_rows = torch.zeros(max_sampled, dtype=torch.long, device=shard.device)

        def run() -> Tensor:
            attention.use(self._rows)
            position = self._rows.position.long()
            if self._samples:
                return shard.logits(self._x, position, self._sampled_rows)
            return shard.hidden(self._x, position)

        self._replay = recorder.record(run)

    def holds(self, num_rows: int, num_sampled: int) -> bool:
        """Whether a step of `num_rows` rows fits, of which `num_sampled` are sampled."""
        return num_rows <= self.num_rows and (
            not self._samples or num_sampled <= len(self._sampled_rows)
        )

    def run(self, micro_batch: MicroBatch, x: Tensor, sampled_rows: Sequence[int]) -> Tensor:
        """Returns the outputs of a step, [S, V] or [T, H], in separate memory; `x` is [T] or
        [T, H], as recorded.

        `micro_batch` has R rows, int32, in the host's memory.
        """
        num_sequences, width = micro_batch.table.shape
        self._x[: len(x)].copy_(x)
        self._rows.sequence.copy_(micro_batch.sequence)
        self._rows.position.copy_(micro_batch.position)
        self._rows.table[:num_sequences, :width].copy_(micro_batch.table)
        if not self._samples:
            return self._replay()[: len(x)].clone()
        self._sampled_rows[: len(sampled_rows)].copy_(torch.tensor(sampled_rows, dtype=torch.long))
        return self._replay()[: len(sampled_rows)].clone()


def graph_sizes(max_rows: int) -> list[int]:
    """Returns the numbers of rows of graphs, up to `max_rows`: powers of two, from FINE_ROWS on
    their middles too."""
    sizes = {max_rows}
    size = 1
    while size < max_rows:
        sizes.add(size)
        if size >= FINE_ROWS and size * 3 // 2 < max_rows:
            sizes.add(size * 3 // 2)
        size *= 2
    return sorted(sizes)
