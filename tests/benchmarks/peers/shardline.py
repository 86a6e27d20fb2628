"""Shardline's bare engine as a peer of the others: a stage on each core, one stage on all cores,
one core alone."""

from __future__ import annotations

from services.standalone.preload import mimalloc
from tests.benchmarks.peers.peer import KV_GIB, NUM_CORES, Command, model

SEATS = 64
KV_BYTES = KV_GIB << 30
"""Of all stages together."""
DTYPES = {"bf16": "bfloat16", "fp32": "float32", "int8": "int8"}
LAYOUTS = {
    "shardline": [f"cpu:{core}" for core in range(NUM_CORES)],
    "shardline-1": [f"cpu:0-{NUM_CORES - 1}"],
    **{f"core-{core}": [f"cpu:{core}"] for core in range(NUM_CORES)},
}
"""Devices of the stages, in order."""


class Shardline:
    """See `Peer`."""

    precisions: tuple[str, ...] = ("bf16", "fp32", "int8")

    def __init__(self, layout: str) -> None:
        self.name = layout

    def install(self) -> None:
        """See `Peer`: it is this environment."""

    def convert(self, precision: str) -> None:
        """See `Peer`: it reads the checkpoint."""
        model(precision)

    def command(self, precision: str) -> Command:
        """See `Peer`."""
        return Command(
            module="shardline",
            settings={
                "model": str(model(precision)),
                "dtype": [DTYPES[precision]],
                "device": LAYOUTS[self.name],
                "seats": SEATS,
                "kv_bytes": KV_BYTES // len(LAYOUTS[self.name]),
            },
            environment={"LD_PRELOAD": mimalloc()},
        )
