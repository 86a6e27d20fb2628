"""Runs what a stage asks of its shard, or of a rank's share of it: passes, moves of KV, adapters.

Knows no StepPlan and no other rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from services.stage.adapters.lora import AdaptedRows, LoadedAdapter, ShardAdapters
from services.stage.adapters.peft import Adapter
from services.stage.attention.attention import Span
from services.stage.attention.offload_area import OffloadArea
from services.stage.engine.forward import Forward
from services.stage.ranks.messages import PassKind
from shardline_scheduler.step_plan import Move

AdapterRows = Sequence[tuple[str, Sequence[int]]]
"""Adapters by their fingerprints, each with the packed rows that it adds to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One way of packed rows through the layers, but for its input."""

    kind: PassKind
    spans: Sequence[Span]
    rows: Sequence[int] = ()
    """The sampled ones."""
    left_out: Sequence[int] = ()
    """Layers that return their input."""
    adapters: AdapterRows = ()


class Runner(Protocol):
    """What an executor runs steps on. Used by one thread."""

    @property
    def forward(self) -> Forward:
        """Returns what this process computes. A direct call runs no other rank."""

    @property
    def area(self) -> OffloadArea:
        """Returns the slots of this process."""

    def run(self, what: Pass, x: Tensor) -> Tensor:
        """Returns hidden states [T, H], or the outputs of the sampled rows [R, H or V]; of a write
        [0].

        `x` holds ids int64 [T] on the first shard, else states [T, H] in its dtype. Raises
        ProtocolError for spans that point outside the KV.
        """

    def move(self, moves: tuple[Move, ...]) -> None:
        """Copies KV blocks to slots and back. Raises ProtocolError for unknown ones."""

    def read_adapter(self, adapter: Adapter) -> LoadedAdapter:
        """Returns the adapter's layers. Raises OSError and SafetensorError."""

    def keep_adapter(self, adapter: Adapter, loaded: LoadedAdapter) -> None:
        """Lets passes name it."""

    def drop_adapter(self, fingerprint: str) -> None:
        """Forgets it."""

    def drop(self) -> None:
        """Frees what other processes hold of the shard; nothing runs any more."""


class ShardRunner:
    """The Runner of one process."""

    def __init__(self, forward: Forward, area: OffloadArea, adapters: ShardAdapters) -> None:
        self.forward = forward
        self.area = area
        self._shard_adapters = adapters
        self._adapters: dict[str, LoadedAdapter] = {}

    def run(self, what: Pass, x: Tensor) -> Tensor:
        """Runs a pass over `x`, ids int64 [T] or states [T, H], with its adapters and without the
        layers that it leaves out; returns the states [T, H] or the sampled outputs [R, H or V]."""
        forward = self.forward
        with forward.shard.without(what.left_out), self._adapted(what.adapters):
            if what.kind is PassKind.HIDDEN:
                return forward.hidden(what.spans, x)
            if what.kind is PassKind.SAMPLED:
                return forward.sampled_outputs(what.spans, x, list(what.rows))
            forward.write(what.spans, x)
            return torch.empty(0)

    def move(self, moves: tuple[Move, ...]) -> None:
        """Copies KV blocks to slots and back."""
        self.area.move(moves)

    def read_adapter(self, adapter: Adapter) -> LoadedAdapter:
        """Returns the layers that this process holds."""
        return self._shard_adapters.load(adapter)

    def keep_adapter(self, adapter: Adapter, loaded: LoadedAdapter) -> None:
        """Keeps it under its fingerprint."""
        self._adapters[adapter.fingerprint] = loaded

    def drop_adapter(self, fingerprint: str) -> None:
        """Forgets it."""
        del self._adapters[fingerprint]

    def drop(self) -> None:
        """Does nothing: no other process holds a share."""

    @contextmanager
    def _adapted(self, adapters: AdapterRows) -> Iterator[None]:
        if not adapters:
            yield
            return
        groups = [AdaptedRows(self._adapters[each], torch.tensor(rows)) for each, rows in adapters]
        narrow = self._shard_adapters.narrow
        with self.forward.adapted(narrow), self._shard_adapters.adding(groups):
            yield
