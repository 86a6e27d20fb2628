"""Staging buffers: pinned host memory through which activations reach an accelerator and leave it,
while it computes.

Owns the buffers of one epoch, the stream for copies to the host, and the events that tell when they
have ended. Knows no frame and no step's content.

Letters of shapes: T packed rows of a step, H the hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardline.base.clock import monotonic_s


class HostCopy:
    """What one step gives, on its way to the host. Holds all memory that the device may still read
    or write."""

    __slots__ = ("_computed", "_copied", "_source", "computed_s", "tensor")

    def __init__(
        self, source: Tensor | None, tensor: Tensor | None, computed: Any, copied: Any
    ) -> None:
        self._source = source
        self._computed = computed
        self._copied = copied
        self.tensor = tensor
        """[T, H] in pinned memory, rubbish until `wait` has returned; None if no activations
        leave."""
        self.computed_s: float | None = None
        """When the step's last operator had ended, by `monotonic_s`; None until somebody has waited
        for it."""

    def wait(self) -> float:
        """Waits until the step is computed and copied; returns `computed_s`. May be called from any
        thread."""
        self._computed.synchronize()
        if self.computed_s is None:
            self.computed_s = monotonic_s()
        self._copied.synchronize()
        return self.computed_s


class Staging:
    """One pinned buffer for each step in flight, which brings the step's activations in and takes
    them out.

    A buffer comes around again after `num_buffers` steps. With one more than the pipeline has lanes
    the step before it is back at the head by then: its copies have ended, and every later stage has
    received its bytes. So a buffer may be handed to ZeroMQ. Used by the engine's thread.
    """

    def __init__(self, module: Any, device: torch.device, num_buffers: int, num_bytes: int) -> None:
        """Allocates nothing yet. `module` is torch's for the device's type."""
        self._module = module
        self._device = device
        self._num_bytes = num_bytes
        self._buffers: list[Tensor | None] = [None] * num_buffers
        self._side = module.Stream(device)

    def buffer(self, step: int) -> Tensor:
        """Returns the buffer of a step: uint8 [num_bytes], pinned."""
        index = step % len(self._buffers)
        buffer = self._buffers[index]
        if buffer is None:
            buffer = self._buffers[index] = torch.empty(
                self._num_bytes, dtype=torch.uint8, pin_memory=True
            )
        return buffer

    def copy_out(self, step: int, states: Tensor | None) -> HostCopy:
        """Begins to copy a step's activations, [T, H] of any dtype, once the device has done all
        that it was given.

        The copy runs on a separate stream, so that the next step's operators need not wait for it.
        """
        states = None if states is None else states.contiguous()
        computed = _event(self._module)
        copied = _event(self._module)
        computed.record(self._module.current_stream(self._device))
        if states is None:
            return HostCopy(None, None, computed, computed)
        target = self.buffer(step)[: states.nbytes].view(states.dtype).view(states.shape)
        self._side.wait_event(computed)
        with self._module.stream(self._side):
            # The allocator gives freed memory to the next operator of the compute stream, which
            # does not wait for this one: the HostCopy keeps `states` until the copy has ended.
            target.copy_(states, non_blocking=True)
            copied.record(self._side)
        return HostCopy(states, target, computed, copied)


def _event(module: Any) -> Any:
    """An event for which a thread sleeps, where the backend can: on CUDA waiting would keep a core
    busy."""
    try:
        return module.Event(blocking=True)
    except TypeError:  # xpu
        return module.Event()
