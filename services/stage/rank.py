"""`python -m services.stage.rank RANK NUM_RANKS LINK MEMORY CORES`: one more rank of a stage, started by its first.

It computes its share of the stage's layers and decides nothing: it runs what the first rank runs. LINK and MEMORY are
descriptors of its link and of the memory of all ranks. It ends with the first rank.
"""

from __future__ import annotations

import gc
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import structlog
import torch

from services.stage.attention.paged_kv import Span
from services.stage.device.cpu import Cpu, pin
from services.stage.engine.accelerator_options import AcceleratorOptions
from services.stage.engine.loading import ForwardLoad, LoadedForward, load_forward
from services.stage.engine.memory import Limits
from services.stage.engine.rank_memory import ToldMemory
from services.stage.kernels import kernel
from services.stage.model.model_info import ModelInfo
from services.stage.ranks.group import RankGroup
from services.stage.ranks.messages import LoadShard, MoveBlocks, PassKind, RunPass, decode
from services.stage.ranks.processes import REFUSED_STATUS
from shardline import log
from shardline.config import Settings
from shardline.errors import Invalid, ProtocolError
from shardline.prctl import die_with_parent, name_process

logger = structlog.get_logger(__name__)


class Rank:
    """The shards that this rank has loaded, each by its number."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._native = kernel.load()
        self._loaded: dict[int, LoadedForward] = {}

    @torch.inference_mode()
    def serve(self, link: Connection) -> None:
        """Does what the first rank tells until it ends. Raises Invalid for what cannot be loaded."""
        while True:
            try:
                message = decode(link.recv_bytes())
            except EOFError:
                return
            if isinstance(message, RunPass):
                # The first rank refuses the same pass, and tells its pipeline.
                with suppress(ProtocolError):
                    self._run(message)
            elif isinstance(message, LoadShard):
                self._loaded[message.number] = self._load(message)
                gc.collect()
                gc.freeze()
            elif isinstance(message, MoveBlocks):
                with suppress(ProtocolError):
                    self._loaded[message.number].area.move(message.moves)
            else:
                del self._loaded[message.number]

    def _load(self, message: LoadShard) -> LoadedForward:
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
        return load_forward(load)

    def _run(self, message: RunPass) -> None:
        forward = self._loaded[message.number].forward
        spans = [Span(start=start, length=length, blocks=blocks) for start, length, blocks in message.spans]
        x = self._group.receive(message.shape, getattr(torch, message.dtype))
        with forward.without(message.left_out):
            if message.kind is PassKind.HIDDEN:
                forward.hidden(spans, x)
            elif message.kind is PassKind.SAMPLED:
                forward.sampled_outputs(spans, x, list(message.rows))
            else:
                forward.write(spans, x)


def main() -> int:
    """Serves until the first rank ends. Returns the exit status."""
    rank, num_ranks, link, memory, cores = sys.argv[1:]
    die_with_parent()
    name_process(f"rank {rank}")
    log.configure(service="stage", level="warning", form=Settings().log_format)  # the first rank says the rest
    pin(tuple(int(core) for core in cores.split(",")))
    try:
        Rank(RankGroup(int(rank), int(num_ranks), int(memory))).serve(Connection(int(link)))
    except Invalid as error:
        logger.critical("refused", field=error.field, problem=error.problem, remedy=error.remedy, rank=rank)
        return REFUSED_STATUS
    return 0


if __name__ == "__main__":
    sys.exit(main())
