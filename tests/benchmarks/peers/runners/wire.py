"""Owns the lines between the benchmark and a runner: settings, `ready`, then workloads in and
tokens with times out.

Runs in the environments of peers: standard library only.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

Settings = dict[str, Any]

_IDLE = threading.Event()
"""Never set."""


class Work:
    """Prompts as token ids, and when each arrives, in seconds after the start."""

    def __init__(self, said: dict[str, Any]) -> None:
        self.prompts: list[list[int]] = said["prompts"]
        self.new_tokens: int = said["new_tokens"]
        self.arrivals_s: list[float] = said["arrivals_s"]


class Record:
    """Tokens of every request, each with the time at which its caller could have it, in seconds
    after the start."""

    def __init__(self, num_requests: int) -> None:
        self.began_s = time.perf_counter()
        self.ids: list[list[int]] = [[] for _ in range(num_requests)]
        self.times_s: list[list[float]] = [[] for _ in range(num_requests)]

    def now_s(self) -> float:
        """Seconds after the start."""
        return time.perf_counter() - self.began_s

    def add(self, index: int, ids: list[int]) -> None:
        """New tokens of one request, now."""
        self.ids[index] += ids
        self.times_s[index] += [self.now_s()] * len(ids)

    def said(self) -> dict[str, Any]:
        """What the benchmark reads."""
        return {"ids": self.ids, "times_s": self.times_s}


class Engine(Protocol):
    """A loaded model."""

    def run(self, work: Work) -> Record:
        """Serves all requests, each from its arrival on."""

    def close(self) -> None:
        """Ends what the engine started."""


class Reader(Protocol):
    """A loaded model that says what it expects after each token."""

    weight_bytes: int
    """Of its weights, as it computes with them."""
    versions: dict[str, str]
    """Those that matter."""

    def logits(self, ids: list[int]) -> bytes:
        """Reads a text by itself; returns float32 [ids, vocabulary]."""


class Stepper(Protocol):
    """An engine that its caller turns: one call, one step of the batch."""

    def add(self, index: int, prompt: list[int], new_tokens: int) -> None:
        """A request that waits from now on."""

    def step(self) -> list[tuple[int, list[int]]]:
        """The new tokens of one step, by request."""


def turn(stepper: Stepper, work: Work) -> Record:
    """Serves `work` by steps: what has arrived joins before the next step."""
    record = Record(len(work.prompts))
    left = sorted(range(len(work.prompts)), key=lambda index: work.arrivals_s[index], reverse=True)
    num_open = 0
    while left or num_open:
        while left and work.arrivals_s[left[-1]] <= record.now_s():
            index = left.pop()
            stepper.add(index, work.prompts[index], work.new_tokens)
            num_open += 1
        if not num_open:
            _IDLE.wait(max(0.0, work.arrivals_s[left[-1]] - record.now_s()))
            continue
        for index, ids in stepper.step():
            record.add(index, ids)
            num_open -= len(record.ids[index]) >= work.new_tokens
    return record


def serve(load: Callable[[Settings], tuple[Engine, dict[str, str]]]) -> None:
    """Loads once, then serves one workload per line."""
    say = _speech()
    engine, versions = load(json.loads(sys.stdin.readline()))
    say({"ready": versions})
    for line in sys.stdin:
        say(engine.run(Work(json.loads(line))).said())
    engine.close()


def serve_logits(load: Callable[[Settings], Reader]) -> None:
    """Loads once, then reads one text per line and writes its logits into the file that the line
    names."""
    say = _speech()
    reader = load(json.loads(sys.stdin.readline()))
    say({"ready": reader.versions, "weight_bytes": reader.weight_bytes})
    for line in sys.stdin:
        asked = json.loads(line)
        say({"num_bytes": Path(asked["path"]).write_bytes(reader.logits(asked["ids"]))})


def _speech() -> Callable[[Any], None]:
    """Keeps standard output for lines: what libraries print goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return lambda said: print(json.dumps(said), file=out, flush=True)
