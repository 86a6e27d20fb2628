"""What run-batch asks of a door: HTTP or Postgres. Knows neither."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import msgspec

ENDED = ("completed", "failed", "expired", "cancelled")


class BatchState(msgspec.Struct, frozen=True, kw_only=True):
    """A batch as it is now."""

    id: str
    status: str
    num_lines: int
    num_completed: int
    num_failed: int
    parts: tuple[str, ...]
    """Files with its answers: of lines that succeeded, then of the others."""
    problem: str | None = None
    """What is wrong with a file that is none."""
    is_taken: bool = True
    """Whether a gateway has seen it."""

    @property
    def has_ended(self) -> bool:
        """Whether it changes no more."""
        return self.status in ENDED


class BatchDoor(Protocol):
    """Takes files and has their answers. Each method but `upload` may be repeated: it does nothing
    twice. Raises Unavailable while its server is away."""

    def upload(self, source: Path) -> str:
        """Stores a file; returns its name."""
        ...

    def begin(self, file_id: str, *, endpoint: str, window: str) -> BatchState:
        """Makes a batch of a file, or finds the one that was made of it."""
        ...

    def look(self, batch: BatchState) -> BatchState:
        """The batch as it is now."""
        ...

    def answers(self, batch: BatchState) -> Iterator[bytes]:
        """All lines of a batch that has ended, in pieces."""
        ...


def key_of(file_id: str) -> str:
    """The idempotency key of a file's batch: the same at each door."""
    return f"run-batch-{file_id}"


def problem_of(message: str, line: int | None) -> str:
    """What is wrong with a file, with the line of it."""
    return f"line {line}: {message}" if line else message
