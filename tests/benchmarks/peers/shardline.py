"""Shardline's bare engine as a peer of the others: one stage on all cores, a stage on each, one
core alone."""

from __future__ import annotations

from services.standalone.preload import mimalloc
from tests.benchmarks.peers.peer import KV_GIB, NUM_CORES, Checkpoint, Command, model

SEATS = 64
KV_BYTES = KV_GIB << 30
"""Of all stages together."""
DTYPES = {"bf16": "bfloat16", "fp32": "float32", "int8": "int8", "int4": "int4"}
LAYOUTS = {
    "shardline": [f"cpu:0-{NUM_CORES - 1}"],
    "shardline-chain": [f"cpu:{core}" for core in range(NUM_CORES)],
    **{f"core-{core}": [f"cpu:{core}"] for core in range(NUM_CORES)},
}
"""Devices of the stages, in order."""


class Shardline:
    """See `LogitsPeer`."""

    precisions: tuple[str, ...] = tuple(DTYPES)

    def __init__(self, layout: str, checkpoint: Checkpoint = model) -> None:
        self.name = layout
        self._checkpoint = checkpoint

    def install(self) -> None:
        """See `Peer`: it is this environment."""

    def convert(self, precision: str) -> None:
        """See `Peer`: it reads the checkpoint."""
        self._checkpoint(precision)

    def command(self, precision: str) -> Command:
        """See `Peer`."""
        return Command(
            module="shardline",
            settings={
                "model": str(self._checkpoint(precision)),
                "dtype": [DTYPES[precision]],
                "device": LAYOUTS[self.name],
                "seats": SEATS,
                "kv_bytes": KV_BYTES // len(LAYOUTS[self.name]),
            },
            environment={"LD_PRELOAD": mimalloc()},
        )

    def reader(self, precision: str) -> Command:
        """See `LogitsPeer`."""
        return Command(
            module="shardline_logits",
            settings={
                "model": str(self._checkpoint(precision)),
                "dtype": DTYPES[precision],
                "device": f"cpu:0-{NUM_CORES - 1}",
            },
        )
