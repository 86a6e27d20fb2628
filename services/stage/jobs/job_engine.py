"""What the job life cycle asks of an engine. Owns the Protocol; knows neither Postgres nor how
tokens are made."""

from __future__ import annotations

from typing import Protocol

from shardline.contract.job import FinishReason
from shardline_scheduler.sequence import Key, Request, TokenSink


class JobEngine(Protocol):
    """A head's engine as seen from other threads. No method waits for a step; events follow in the
    engine's thread."""

    @property
    def epoch(self) -> int:
        """The epoch that it runs in, or ran in last."""

    @property
    def num_steps(self) -> int:
        """Steps computed in this epoch."""

    @property
    def is_fenced(self) -> bool:
        """The engine runs, and only its leases hold it back."""

    def extend_lease(self, until_s: float) -> None:
        """Let the engine schedule and emit until this moment of the lease clock, and no longer."""

    def add(self, request: Request, sink: TokenSink) -> None:
        """Take in a claimed job."""

    def begin(self, key: Key) -> None:
        """Let a parked job run."""

    def end(self, key: Key, reason: FinishReason) -> None:
        """End a job with what it has; its Finished event follows, unless it ended already."""

    def release(self, key: Key) -> None:
        """Take a job out of quarantine: its tokens are saved."""

    def forget(self, key: Key) -> None:
        """Drop a job without an event."""
