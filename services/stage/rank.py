"""`python -m services.stage.rank PARENT RANK NUM_RANKS LINK MEMORY CORES`: one more rank, started
by a stage's first.

It computes its share of the stage's layers and decides nothing: it runs what the first rank runs.
LINK and MEMORY are descriptors of its link and of the memory of all ranks. It ends with the first
rank.
"""

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import structlog
import torch

from services.stage.adapters.peft import Adapter, LowRank
from services.stage.attention.paged_kv import Span
from services.stage.device.cpu import Cpu, pin
from services.stage.engine.accelerator_options import AcceleratorOptions
from services.stage.engine.loading import ForwardLoad, load_forward
from services.stage.engine.memory import Limits
from services.stage.engine.rank_memory import ToldMemory
from services.stage.engine.shard_runner import Pass, Runner
from services.stage.kernels import kernel
from services.stage.model.model_info import ModelInfo
from services.stage.model.weights import stamp_of
from services.stage.ranks.group import RankGroup
from services.stage.ranks.messages import (
    DropAdapter,
    DropShard,
    LoadAdapter,
    LoadShard,
    MoveBlocks,
    RunPass,
    decode,
)
from services.stage.ranks.processes import REFUSED_STATUS
from shardline.base import log
from shardline.base.config import Settings
from shardline.base.errors import Invalid, ProtocolError, Unavailable
from shardline_server.host.prctl import die_with_parent, name_process

logger = structlog.get_logger(__name__)


class Rank:
    """The shards that this rank has loaded, each by its number."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._native = kernel.load()
        self._loaded: dict[int, LoadedRank] = {}

    @torch.inference_mode()
    def serve(self, link: Connection) -> None:
        """Does what the first rank tells until it ends. Raises Invalid for what cannot be
        loaded."""
        while True:
            try:
                message = decode(link.recv_bytes())
            except EOFError:
                return
            if isinstance(message, LoadShard):
                self._loaded[message.number] = self._load(message)
                gc.collect()
                gc.freeze()
            elif isinstance(message, DropShard):
                del self._loaded[message.number]
            else:
                # The first rank refuses the same pass or move, and tells its pipeline.
                with suppress(ProtocolError):
                    self._loaded[message.number].do(message)

    def _load(self, message: LoadShard) -> LoadedRank:
        limits = Limits(
            kv_bytes=None,
            offload_bytes=message.offload_bytes,
            offload_folder=None if message.offload_folder is None else Path(message.offload_folder),
            token_budget=message.token_budget,
            max_open=message.max_open,
            streamed_layers=int(message.streams),
            streamed_folder=Path(message.streamed_folder),
        )
        load = ForwardLoad(
            info=ModelInfo.read(message.model),
            layers=range(*message.layers),
            device=torch.device("cpu"),
            of_dtype=Cpu.dtypes[message.dtype],
            weights_dtype=message.dtype,
            limits=limits,
            memory=ToldMemory(self._group, limits),
            cache_folder=Path(message.cache_folder),
            options=AcceleratorOptions(),
            native=self._native,
            group=self._group,
        )
        return LoadedRank(self._group, load_forward(load).runner)


class LoadedRank:
    """A share of a shard."""

    def __init__(self, group: RankGroup, runner: Runner) -> None:
        self._group = group
        self._runner = runner

    def do(self, message: RunPass | MoveBlocks | LoadAdapter | DropAdapter) -> None:
        """What the first rank does too. Raises ProtocolError if that does."""
        if isinstance(message, RunPass):
            self._run(message)
        elif isinstance(message, MoveBlocks):
            self._runner.move(message.moves)
        elif isinstance(message, LoadAdapter):
            self._load(message)
        else:
            self._runner.drop_adapter(message.fingerprint)

    def _run(self, message: RunPass) -> None:
        what = Pass(
            kind=message.kind,
            spans=[Span(start=start, length=num, blocks=own) for start, num, own in message.spans],
            rows=message.rows,
            left_out=message.left_out,
            adapters=message.adapters,
        )
        self._runner.run(what, self._group.receive(message.shape, getattr(torch, message.dtype)))

    def _load(self, message: LoadAdapter) -> None:
        """Reads the file that the first rank has read. One that was replaced since ends this
        process, and the stage."""
        path = Path(message.weights)
        layers = {
            name: LowRank(rank=rank, scale=scale) for name, (rank, scale) in message.layers.items()
        }
        adapter = Adapter(
            name=path.parent.name, weights=path, fingerprint=message.fingerprint, layers=layers
        )
        loaded = self._runner.read_adapter(adapter)
        if stamp_of(path) != message.stamp:
            raise Unavailable(
                f"{path} was replaced while ranks read it: the next start reads it again"
            )
        self._runner.keep_adapter(adapter, loaded)


def main() -> int:
    """Serves until the first rank ends. Returns the exit status."""
    parent, rank, num_ranks, link, memory, cores = sys.argv[1:]
    die_with_parent()
    if os.getppid() != int(parent):  # it ended while this process was importing
        return 0
    name_process(f"rank {rank}")
    # The first rank logs the rest
    log.configure(service="stage", level="warning", form=Settings().log_format)
    pin(tuple(int(core) for core in cores.split(",")))
    try:
        Rank(RankGroup(int(rank), int(num_ranks), int(memory))).serve(Connection(int(link)))
    except Invalid as error:
        logger.critical(
            "refused", field=error.field, problem=error.problem, remedy=error.remedy, rank=rank
        )
        return REFUSED_STATUS
    return 0


if __name__ == "__main__":
    sys.exit(main())
