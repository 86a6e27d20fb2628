"""What the first rank of a stage tells the others to load and to run. Knows no StepPlan."""

from __future__ import annotations

from torch import Tensor

from services.stage.adapters.peft import Adapter
from services.stage.engine.forward import Pass
from services.stage.engine.loading import ForwardLoad
from services.stage.model.weights import stamp_of
from services.stage.ranks.messages import (
    DropAdapter,
    DropShard,
    LoadAdapter,
    LoadShard,
    MoveBlocks,
    RunPass,
)
from services.stage.ranks.processes import OtherRanks
from shardline_scheduler.step_plan import Move


class RankBroadcaster:
    """One loaded shard of all ranks, of which this process has the first share."""

    def __init__(self, ranks: OtherRanks, load: ForwardLoad) -> None:
        """Tells the other ranks to load what this one is about to load."""
        self._ranks = ranks
        self._number = next(ranks.numbers)
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
                offload_folder=None
                if limits.offload_folder is None
                else str(limits.offload_folder),
                streams=limits.streamed_layers != 0,
                streamed_folder=str(limits.streamed_folder),
                cache_folder=str(load.cache_folder),
            )
        )

    def run(self, what: Pass, x: Tensor) -> None:
        """Tells them what this rank is about to run: `x` holds ids int64 [T] or states [T, H] of T
        packed rows."""
        self._ranks.post(
            RunPass(
                number=self._number,
                kind=what.kind,
                spans=tuple((span.start, span.length, tuple(span.blocks)) for span in what.spans),
                rows=tuple(what.rows),
                left_out=tuple(what.left_out),
                adapters=tuple((fingerprint, tuple(rows)) for fingerprint, rows in what.adapters),
                shape=tuple(x.shape),
                dtype=str(x.dtype).removeprefix("torch."),
            )
        )
        self._ranks.group.send(x)

    def move(self, moves: tuple[Move, ...]) -> None:
        """Tells them which KV blocks this rank is about to copy."""
        self._ranks.post(MoveBlocks(number=self._number, moves=moves))

    def load_adapter(self, adapter: Adapter) -> None:
        """Tells them which adapter this rank has loaded."""
        self._ranks.post(
            LoadAdapter(
                number=self._number,
                fingerprint=adapter.fingerprint,
                weights=str(adapter.weights),
                stamp=stamp_of(adapter.weights),
                layers={name: (layer.rank, layer.scale) for name, layer in adapter.layers.items()},
            )
        )

    def drop_adapter(self, fingerprint: str) -> None:
        """Tells them which adapter this rank has forgotten."""
        self._ranks.post(DropAdapter(number=self._number, fingerprint=fingerprint))

    def drop(self) -> None:
        """Lets the other ranks forget the shard."""
        self._ranks.post(DropShard(number=self._number))
