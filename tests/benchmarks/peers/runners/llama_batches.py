"""llama.cpp as an engine that is turned by steps: batches as its server makes them, all that write
first, then prompts as far as a batch has room."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tests.benchmarks.peers.runners.llama_library import BATCH, LlamaModel, Row
from tests.benchmarks.peers.runners.wire import Engine, Record, Settings, Work, serve, turn


@dataclass(slots=True, eq=False)
class Seat:
    """A request. `pending` are its tokens without KV, the first of them at `place`."""

    index: int
    pending: list[int]
    num_left: int
    sequence: int = -1
    place: int = 0
    is_writing: bool = False

    def rows(self, room: int) -> list[Row]:
        """Returns what the next batch computes of it; the last of its tokens gives another."""
        now = self.pending[:room]
        ends = len(now) == len(self.pending)
        last = len(now) - 1
        return [
            (token, self.place + number, self.sequence, ends and number == last)
            for number, token in enumerate(now)
        ]


class Decoder(Protocol):
    """What is used of `LlamaModel`."""

    def decode(self, rows: Sequence[Row]) -> Any:
        """Returns the logits of rows that want some, float32 [wanted, vocabulary]."""

    def forget(self, sequence: int) -> None:
        """Frees the KV of a sequence."""


class LlamaBatches:
    """One context with a sequence for each seat; the likeliest token is the next one."""

    def __init__(self, model: Decoder, num_seats: int) -> None:
        self._model = model
        self._free = list(range(num_seats))
        self._waiting: deque[Seat] = deque()
        self._seats: list[Seat] = []

    def run(self, work: Work) -> Record:
        """See `Engine`."""
        return turn(self, work)

    def close(self) -> None:
        """See `Engine`."""

    def add(self, index: int, prompt: list[int], new_tokens: int) -> None:
        """See `Stepper`."""
        self._waiting.append(Seat(index=index, pending=list(prompt), num_left=new_tokens))

    def step(self) -> list[tuple[int, list[int]]]:
        """See `Stepper`."""
        while self._waiting and self._free:
            self._seats.append(self._waiting.popleft())
            self._seats[-1].sequence = self._free.pop()
        rows: list[Row] = []
        ending: list[Seat] = []
        for seat in sorted(self._seats, key=lambda seat: not seat.is_writing):
            now = seat.rows(BATCH - len(rows))
            rows += now
            seat.place += len(now)
            del seat.pending[: len(now)]
            if not seat.pending:
                ending.append(seat)
        logits = self._model.decode(rows)
        tokens: list[int] = logits.argmax(1).tolist() if ending else []
        for seat, token in zip(ending, tokens, strict=True):
            self._continue(seat, token)
        return [(seat.index, [token]) for seat, token in zip(ending, tokens, strict=True)]

    def _continue(self, seat: Seat, token: int) -> None:
        seat.pending.append(token)
        seat.is_writing = True
        seat.num_left -= 1
        if not seat.num_left:
            self._seats.remove(seat)
            self._free.append(seat.sequence)
            self._model.forget(seat.sequence)


def load(settings: Settings) -> tuple[Engine, dict[str, str]]:
    """The engine, and the versions that matter."""
    model = LlamaModel(settings)
    return LlamaBatches(model, settings["sequences"]), model.versions


if __name__ == "__main__":
    serve(load)
