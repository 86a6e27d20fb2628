"""Shardline's bare engine behind the same lines as its peers. Runs in the project's own
environment."""

from __future__ import annotations

import argparse
import tempfile
import threading
from importlib.metadata import version
from pathlib import Path

from shardline.contract.job import SamplingParams
from shardline_scheduler.events import Event, NewTokens, SequenceFailed, SequenceFinished
from shardline_scheduler.sequence import Request
from shardline_server.tokenize import CompletionText
from tests.benchmarks.bare import Pipeline, parser
from tests.benchmarks.peers.runners.wire import Engine, Record, Settings, Work, serve

_IDLE = threading.Event()
"""Never set."""


class Shardline(Pipeline):
    """The pipeline of `bare.py`, with the time of every token."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._record = Record(0)
        self._done = threading.Semaphore(0)
        self._failed: list[str] = []
        super().__init__(folder, options)

    def serve(self, work: Work) -> Record:
        """See `wire.Engine`."""
        record = self._record = Record(len(work.prompts))
        params = SamplingParams(max_tokens=work.new_tokens, temperature=0.0, ignore_eos=True)
        for index in sorted(range(len(work.prompts)), key=work.arrivals_s.__getitem__):
            _IDLE.wait(max(0.0, work.arrivals_s[index] - record.now_s()))
            request = Request(
                key=(str(index), 0),
                prompt_ids=tuple(work.prompts[index]),
                params=params,
                seed=index,
            )
            self._engine.add(request, CompletionText(self._vocabulary, params, room=1024))
        for _ in work.prompts:
            self._done.acquire()
        if self._failed:
            raise RuntimeError(self._failed[0])
        return record

    def _emit(self, events: object) -> None:
        assert isinstance(events, list)
        for event in events:
            self._take(event)

    def _take(self, event: Event) -> None:
        if isinstance(event, NewTokens):
            self._record.add(int(event.key[0]), list(event.ids))
        elif isinstance(event, SequenceFinished):
            index = int(event.key[0])
            self._record.add(index, list(event.output_ids[len(self._record.ids[index]) :]))
            self._done.release()
        elif isinstance(event, SequenceFailed):
            self._failed.append(event.reason)
            self._done.release()


class Ours:
    """`wire.Engine` over a pipeline, whose own `run` counts differently."""

    def __init__(self, settings: Settings) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="shardline-peers-")
        defaults = vars(parser().parse_args(["--model", settings["model"], "--device", "cpu:0"]))
        # A model of random weights repeats itself: prompt lookup would guess what no real text lets
        # it guess.
        options = argparse.Namespace(**defaults | {"prompt_lookup": 0} | settings)
        self._pipeline = Shardline(Path(self._folder.name), options)

    def run(self, work: Work) -> Record:
        """See `wire.Engine`."""
        return self._pipeline.serve(work)

    def close(self) -> None:
        """See `wire.Engine`."""
        self._pipeline.close()
        self._folder.cleanup()


def load(settings: Settings) -> tuple[Engine, dict[str, str]]:
    """The engine, and the versions that matter."""
    return Ours(settings), {name: version(name) for name in ("shardline", "torch", "transformers")}


if __name__ == "__main__":
    serve(load)
