"""Shardline as a reader of texts: one stage that holds the whole model. Runs in the project's own
environment."""

from __future__ import annotations

import tempfile
from importlib.metadata import version
from pathlib import Path

import torch

from services.stage.attention.paged_kv import Span
from services.stage.device.acquire import acquire
from shardline_scheduler.kv_blocks import blocks_for
from tests.benchmarks.peers.runners.wire import Reader, Settings, serve_logits
from tests.benchmarks.perplexity import num_held_bytes, stage_of


class StageReader:
    """See `Reader`."""

    def __init__(self, settings: Settings) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="shardline-logits-")
        folder = Path(self._folder.name)
        device = acquire(settings["device"], worker="logits", lock_folder=folder)
        self._stage = stage_of(Path(settings["model"]), settings["dtype"], device, folder)
        self.weight_bytes = num_held_bytes(self._stage)
        self.versions = {name: version(name) for name in ("shardline", "torch", "transformers")}

    def logits(self, ids: list[int]) -> bytes:
        """See `Reader`."""
        span = Span(start=0, length=len(ids), blocks=list(range(blocks_for(len(ids)))))
        rows = list(range(len(ids)))
        with torch.inference_mode():
            logits = self._stage.forward.sampled_outputs([span], torch.tensor(ids), rows)
        return logits.float().contiguous().numpy().tobytes()


def load(settings: Settings) -> Reader:
    """The loaded model."""
    return StageReader(settings)


if __name__ == "__main__":
    serve_logits(load)
