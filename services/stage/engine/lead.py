"""What the first rank of a stage tells the others to load and to run. Knows no StepPlan."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from services.stage.attention.paged_kv import Span
from services.stage.engine.loading import ForwardLoad
from services.stage.ranks.messages import DropShard, LoadShard, MoveBlocks, PassKind, RunPass
from services.stage.ranks.processes import OtherRanks
from services.stage.scheduling.step_plan import Move


class RanksLead:
    """One loaded shard of all ranks, of which this process has the first share."""

    def __init__(self, ranks: OtherRanks, load: ForwardLoad) -> None:
        """Tells the other ranks to load what this one is about to load."""
        self._ranks, self._number = ranks, next(ranks.numbers)
        limits = load.limits
        ranks.post(
            LoadShard(
                number=self._number,
                model=str(load.info.path),
                layers=(load.layers.start, load.layers.stop),
                dtype=load.weights_dtype,
                token_budget=limits.token_budget,
                max_open=limits.max_open,
                offload_bytes=limits.offload_bytes,
                offload_folder=None if limits.offload_folder is None else str(limits.offload_folder),
                streams=limits.streamed_layers != 0,
                streamed_folder=str(limits.streamed_folder),
                cache_folder=str(load.cache_folder),
            )
        )

    def run(
        self, kind: PassKind, spans: Sequence[Span], x: Tensor, rows: Sequence[int], left_out: Sequence[int]
    ) -> None:
        """Tells them what this rank is about to run: `x` holds ids int64 [T] or states [T, H] of T packed rows."""
        self._ranks.post(
            RunPass(
                number=self._number,
                kind=kind,
                spans=tuple((span.start, span.length, tuple(span.blocks)) for span in spans),
                rows=tuple(rows),
                left_out=tuple(left_out),
                shape=tuple(x.shape),
                dtype=str(x.dtype).removeprefix("torch."),
            )
        )
        self._ranks.group.send(x)

    def move(self, moves: tuple[Move, ...]) -> None:
        """Tells them which KV blocks this rank is about to copy."""
        self._ranks.post(MoveBlocks(number=self._number, moves=moves))

    def drop(self) -> None:
        """Lets the other ranks forget the shard."""
        self._ranks.post(DropShard(number=self._number))
