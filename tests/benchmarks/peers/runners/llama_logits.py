"""llama.cpp as a reader of texts."""

from __future__ import annotations

from tests.benchmarks.peers.runners.llama_library import LlamaModel
from tests.benchmarks.peers.runners.wire import Reader, Settings, serve_logits


class LlamaReader:
    """See `Reader`."""

    def __init__(self, settings: Settings) -> None:
        self._model = LlamaModel(settings)
        self.weight_bytes = self._model.weight_bytes
        self.versions = self._model.versions

    def logits(self, ids: list[int]) -> bytes:
        """See `Reader`."""
        self._model.forget(0)
        logits = self._model.decode([(token, place, 0, True) for place, token in enumerate(ids)])
        return bytes(logits.tobytes())


def load(settings: Settings) -> Reader:
    """The loaded model."""
    return LlamaReader(settings)


if __name__ == "__main__":
    serve_logits(load)
