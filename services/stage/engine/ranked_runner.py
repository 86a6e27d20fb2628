"""A shard that several ranks compute: has the others do what this process does, and nothing else.

The one place of an engine that knows of other ranks once a shard is loaded. Knows no StepPlan.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from services.stage.adapters.lora import LoadedAdapter
from services.stage.adapters.peft import Adapter
from services.stage.engine.loading import ForwardLoad, LoadedForward, load_forward
from services.stage.engine.memory import StageMemory
from services.stage.engine.rank_memory import TellingMemory
from services.stage.engine.rank_trial import check_ranks
from services.stage.engine.shard_runner import Pass, Runner
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
from shardline.base.errors import Invalid
from shardline_scheduler.step_plan import Move


class RankedRunner:
    """The Runner of a stage's first rank."""

    def __init__(self, runner: Runner, ranks: OtherRanks, number: int) -> None:
        """`runner` has this rank's share of the shard, `number` is the shard's on the others."""
        self.forward = runner.forward
        self.area = runner.area
        self._runner = runner
        self._ranks = ranks
        self._number = number

    def run(self, what: Pass, x: Tensor) -> Tensor:
        """Runs a pass over `x`, ids int64 [T] or states [T, H], on every rank; returns the states
        [T, H] or the sampled outputs [R, H or V]."""
        self._ranks.post(
            RunPass(
                number=self._number,
                kind=what.kind,
                spans=tuple((span.start, span.length, tuple(span.blocks)) for span in what.spans),
                rows=tuple(what.rows),
                left_out=tuple(what.left_out),
                adapters=tuple((each, tuple(rows)) for each, rows in what.adapters),
                shape=tuple(x.shape),
                dtype=str(x.dtype).removeprefix("torch."),
            )
        )
        self._ranks.group.send(x)
        return self._runner.run(what, x)

    def move(self, moves: tuple[Move, ...]) -> None:
        """Copies KV blocks on every rank."""
        self._ranks.post(MoveBlocks(number=self._number, moves=moves))
        self._runner.move(moves)

    def read_adapter(self, adapter: Adapter) -> LoadedAdapter:
        """Returns the layers that this rank holds."""
        return self._runner.read_adapter(adapter)

    def keep_adapter(self, adapter: Adapter, loaded: LoadedAdapter) -> None:
        """Has the others load the adapter that this rank has loaded."""
        self._runner.keep_adapter(adapter, loaded)
        layers = {name: (layer.rank, layer.scale) for name, layer in adapter.layers.items()}
        self._ranks.post(
            LoadAdapter(
                number=self._number,
                fingerprint=adapter.fingerprint,
                weights=str(adapter.weights),
                stamp=stamp_of(adapter.weights),
                layers=layers,
            )
        )

    def drop_adapter(self, fingerprint: str) -> None:
        """Forgets it on every rank."""
        self._runner.drop_adapter(fingerprint)
        self._ranks.post(DropAdapter(number=self._number, fingerprint=fingerprint))

    def drop(self) -> None:
        """Lets the others forget their shares."""
        self._ranks.post(DropShard(number=self._number))


def load_ranked(ranks: OtherRanks, load: ForwardLoad, memory: StageMemory) -> LoadedForward:
    """Loads a shard on all ranks, each its share. Raises Invalid for what ranks cannot serve."""
    group = ranks.group
    native = load.native
    if native is None:
        problem = "ranks need the CPU kernels, which this stage does not have"
        raise Invalid("SHARDLINE_TP", problem, "Set it to 1")
    check_ranks(load.info.config, load.cache_folder, native, group.num_ranks)
    number = next(ranks.numbers)
    ranks.post(_message(load, number))
    loaded = load_forward(replace(load, memory=TellingMemory(memory, group), group=group))
    return replace(loaded, runner=RankedRunner(loaded.runner, ranks, number))


def _message(load: ForwardLoad, number: int) -> LoadShard:
    limits = load.limits
    return LoadShard(
        number=number,
        model=str(load.info.path),
        layers=(load.layers.start, load.layers.stop),
        dtype=load.weights_dtype,
        token_budget=limits.token_budget,
        max_open=limits.max_open,
        offload_bytes=limits.offload_bytes,
        offload_folder=_text(limits.offload_folder),
        streams=limits.streamed_layers != 0,
        streamed_folder=str(limits.streamed_folder),
        cache_folder=str(load.cache_folder),
    )


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
