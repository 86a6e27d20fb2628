"""OpenVINO GenAI's continuous batching. Runs in its own environment."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from tests.benchmarks.peers.runners.wire import Engine, Record, Settings, Work, serve, turn


class OpenVino:
    """One pipeline with its KV cache; requests are token ids."""

    def __init__(self, settings: Settings) -> None:
        scheduler = genai.SchedulerConfig()
        for name, value in settings["scheduler"].items():
            setattr(scheduler, name, value)
        self._pipeline = genai.ContinuousBatchingPipeline(
            settings["model"], scheduler, "CPU", settings["properties"]
        )
        self._open: dict[int, Any] = {}
        self._number = 0

    def run(self, work: Work) -> Record:
        """See `Engine`."""
        return turn(self, work)

    def close(self) -> None:
        """See `Engine`."""

    def add(self, index: int, prompt: list[int], new_tokens: int) -> None:
        """See `Stepper`."""
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new_tokens
        config.ignore_eos = True
        config.do_sample = False
        self._number += 1
        ids = ov.Tensor(np.array([prompt], dtype=np.int64))
        self._open[index] = self._pipeline.add_request(self._number, ids, config)

    def step(self) -> list[tuple[int, list[int]]]:
        """See `Stepper`."""
        self._pipeline.step()
        new = [(index, _read(handle)) for index, handle in self._open.items() if handle.can_read()]
        for index, handle in list(self._open.items()):
            if handle.get_status() != genai.GenerationStatus.RUNNING and not handle.can_read():
                del self._open[index]
        return new


def _read(handle: Any) -> list[int]:
    (output,) = handle.read().values()
    return list(output.generated_ids)


def load(settings: Settings) -> tuple[Engine, dict[str, str]]:
    """The engine, and the versions that matter."""
    return OpenVino(settings), {
        name: version(name) for name in ("openvino", "openvino-genai", "optimum-intel")
    }


if __name__ == "__main__":
    serve(load)
