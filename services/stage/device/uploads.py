"""Uploads: copies from the host's memory to an accelerator, in parallel with its computation.

Owns their stream, and the events by which it and the stream of the computation wait for each other.
Knows no weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Uploads:
    """Called by the thread that runs steps."""

    def __init__(self, device: torch.device, module: Any, *, pins: bool) -> None:
        """`module` is torch's for the device's type; None where it lacks streams or events: then
        copies wait."""
        self.device = device
        self._module = module
        self._pins = pins
        self._side = None if module is None else module.Stream(device)

    def host_memory(self, num_bytes: int) -> Tensor:
        """Returns int8 [num_bytes], pinned where the backend does that. Raises RuntimeError if the
        host has no room."""
        return torch.empty(num_bytes, dtype=torch.int8, pin_memory=self._pins)

    def begin(self, copies: Iterable[tuple[Tensor, Tensor]]) -> Callable[[], object]:
        """Begins to copy: into each first tensor, on the device, the second one, of the host's
        memory, both int8 [bytes].

        The copies follow what the device was given before, which may still read their targets.
        Returns what has it wait for them before all that it is given next.
        """
        if self._side is None:
            for target, source in copies:
                target.copy_(source)
            return lambda: None
        module = self._module
        side = self._side
        computed = module.Event()
        copied = module.Event()
        computed.record(module.current_stream(self.device))
        side.wait_event(computed)
        with module.stream(side):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
            copied.record(side)
        return lambda: module.current_stream(self.device).wait_event(copied)

    def finish(self) -> None:
        """Waits until all copies have ended."""
        if self._side is not None:
            self._side.synchronize()
