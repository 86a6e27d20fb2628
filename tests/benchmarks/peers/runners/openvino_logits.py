"""OpenVINO as a reader of texts: the model that its pipeline runs, compiled alike. Runs in its own
environment."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import numpy as np
import openvino as ov

from tests.benchmarks.peers.runners.wire import Reader, Settings, serve_logits


class OpenVinoReader:
    """See `Reader`."""

    def __init__(self, settings: Settings) -> None:
        folder = Path(settings["model"])
        model = folder / "openvino_model.xml"
        compiled = ov.Core().compile_model(str(model), "CPU", settings["properties"])
        self._request = compiled.create_infer_request()
        self.weight_bytes = model.with_suffix(".bin").stat().st_size
        self.versions = {"openvino": version("openvino")}

    def logits(self, ids: list[int]) -> bytes:
        """See `Reader`."""
        self._request.reset_state()
        self._request.infer(
            {
                "input_ids": np.array([ids], np.int64),
                "attention_mask": np.ones((1, len(ids)), np.int64),
                "position_ids": np.arange(len(ids), dtype=np.int64)[None],
                "beam_idx": np.zeros(1, np.int32),
            }
        )
        logits = self._request.get_tensor("logits").data
        return bytes(logits.astype(np.float32).tobytes())


def load(settings: Settings) -> Reader:
    """The loaded model."""
    return OpenVinoReader(settings)


if __name__ == "__main__":
    serve_logits(load)
