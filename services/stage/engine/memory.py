"""Divides a stage's memory between weights and KV, and chooses the layers that it does not hold.
Knows sizes only."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from services.stage.attention.offload_area import OffloadArea
from services.stage.attention.paged_kv import KvShape, PagedKv
from services.stage.device.device import Device
from services.stage.recurrent.states import RecurrentStates, StateShapes, bytes_per_slot
from shardline.base.errors import Invalid
from shardline.contract.fleet.stage_memory import NUM_BUFFERS, PACKING_FACTOR
from shardline_scheduler.kv_blocks import blocks_for

DEFAULT_KV_SHARE = 0.4
"""Share of the memory that is free once the shard is loaded. To start several stages on a host,
divide it by them."""
STATES_SHARE = 0.5
"""Of the memory of KV, what the states of recurrent layers may take."""
MAX_EMPTY_BLOCKS = 1 << 16
"""KV blocks of a stage without attention, at most: the scheduler keeps a list of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a stage may take and hold."""

    kv_bytes: int | None
    """Of KV; None for `kv_share` of the memory that is free once the shard is loaded, or for what a
    limit leaves."""
    memory_bytes: int | None = None
    """The limit: of weights, KV and offload area together."""
    offload_bytes: int = 0
    """Of KV outside the pool."""
    offload_folder: Path | None = None
    """Where it lies in a file; None: in host memory."""
    kv_share: float = DEFAULT_KV_SHARE
    streamed_layers: int | Literal["auto"] = 0
    """Layers with weights that memory does not hold; auto: as few as make weights and KV fit."""
    streamed_folder: Path = Path()
    """Where these lie in a file; those of an accelerator lie in the host's memory."""
    token_budget: int
    """Rows of one step."""
    max_open: int
    """Sequences."""
    adapters_folder: Path | None = None
    """Of subfolders with adapters in PEFT's format; None: no adapters."""
    max_adapters: int = 1
    """In memory at once."""

    @property
    def max_decodes(self) -> int:
        """Sequences that one step decodes at most: those with seats, half of the open ones."""
        return max(1, min(self.max_open // 2, self.token_budget))

    def offload_bytes_on(self, device: Device) -> int:
        """The device's own memory that the offload area takes."""
        return self.offload_bytes if device.is_cpu and self.offload_folder is None else 0


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """What a shard's weights will take."""

    all: int
    by_layer: Mapping[int, int]
    """The part of each layer that can be streamed, by the layer's number."""

    def held(self, streamed: Collection[int]) -> int:
        """Returns what memory holds if these layers are streamed: the rest, and buffers for the
        largest of them."""
        largest = max((self.by_layer[number] for number in streamed), default=0)
        return self.all - self.of(streamed) + NUM_BUFFERS * largest

    def of(self, streamed: Collection[int]) -> int:
        """Returns what is streamed of these layers."""
        return sum(self.by_layer[number] for number in streamed)

    def spread(self, num: int) -> tuple[int, ...]:
        """Returns `num` layers, or all if these are fewer, as far apart as can be: others compute
        while they are read."""
        numbers = sorted(number for number, size in self.by_layer.items() if size)
        num = min(num, len(numbers))
        return tuple(numbers[(2 * index + 1) * len(numbers) // (2 * num)] for index in range(num))

    def least_streamed(self, limit: int) -> tuple[int, ...]:
        """Returns the fewest layers without which memory holds at most `limit` bytes; all if none
        are few enough.

        An even number: a pass begins with the buffer that the one before it did not end with.
        """
        for num in range(0, len(self.by_layer), 2):
            if self.held(streamed := self.spread(num)) <= limit:
                return streamed
        return self.spread(len(self.by_layer))


class StageMemory:
    """What one stage takes of its device's memory, in the order of its methods. No other stage
    measures meanwhile."""

    def __init__(self, limits: Limits, device: Device) -> None:
        self._limits = limits
        self._device = device
        self._taken = 0
        """Bytes of weights, once they are promised."""
        self._kv_left: int | None = None
        """Bytes of KV, once states have taken theirs."""

    def fit_weights(self, weights: WeightBytes) -> tuple[int, ...]:
        """Returns the layers to stream, by their numbers, before any weight is read: checks that
        the rest and KV fit into free memory, and promises to take it.

        Raises Invalid, with the remedy, if they do not.
        """
        limits = self._limits
        with self._device.reservations.alone():
            available = self._available_bytes()
            kv_bytes = self._offload_bytes + (limits.kv_bytes or 0)
            if limits.streamed_layers == "auto":
                kv_bytes += 0 if limits.kv_bytes else int((available - kv_bytes) * limits.kv_share)
                streamed = weights.least_streamed(int((available - kv_bytes) / PACKING_FACTOR))
            else:
                streamed = weights.spread(limits.streamed_layers)
            taken = int(weights.held(streamed) * PACKING_FACTOR)
            if taken + kv_bytes > available:
                raise self._too_large(weights, streamed, kv_bytes, available)
            self._device.reservations.make(taken + kv_bytes + self._check_host(weights, streamed))
        self._taken = taken
        return streamed

    def make_states(self, shapes: Mapping[int, StateShapes]) -> RecurrentStates:
        """Allocates slots for what recurrent layers keep, of the memory of KV. Raises Invalid if
        it holds no slot."""
        slot_bytes = bytes_per_slot(shapes)
        if not slot_bytes:
            return RecurrentStates(shapes, 0)
        with self._device.reservations.alone():
            kv_bytes = self._kv_bytes()
            num = num_slots(slot_bytes, kv_bytes, max_open=self._limits.max_open)
            states = RecurrentStates(shapes, num, self._device.torch_device)
            self._kv_left = kv_bytes - states.num_bytes
        return states

    def make_kv(
        self,
        kv_shapes: Mapping[int, KvShape],
        dtype: torch.dtype,
        *,
        context: int,
        num_ranks: int = 1,
    ) -> PagedKv:
        """Allocates this stage's KV, then promises the offload area. Raises Invalid if the memory
        holds no KV block.

        `kv_shapes` are of one of `num_ranks` ranks, which all take as much.
        """
        with self._device.reservations.alone():
            kv_bytes = self._kv_bytes() if self._kv_left is None else self._kv_left
            kv_bytes = kv_bytes // num_ranks
            num = num_blocks(
                kv_shapes, dtype, kv_bytes, context=context, max_open=self._limits.max_open
            )
            kv = PagedKv(
                layers=kv_shapes, num_blocks=num, dtype=dtype, device=self._device.torch_device
            )
            self._device.reservations.make(self._offload_bytes)
        return kv

    def make_offload_area(self, kv: PagedKv, *, num_ranks: int = 1) -> OffloadArea:
        """Allocates slots next to this KV, which is of one of `num_ranks` ranks, then withdraws the
        promise.

        Raises Invalid if there is no room.
        """
        limits = self._limits
        num_bytes = limits.offload_bytes // num_ranks
        with self._device.reservations.alone():
            area = OffloadArea(
                kv, num_bytes, limits.offload_folder, synchronize=self._device.synchronize
            )
            self._device.reservations.make(0)
        return area

    def _too_large(
        self,
        weights: WeightBytes,
        streamed: tuple[int, ...],
        kv_bytes: int,
        available: int,
    ) -> Invalid:
        held = weights.held(streamed)
        few = "Use more stages, fewer layers here, a smaller dtype"
        what = f" but for {len(streamed)} streamed layers" if streamed else ""
        stream = "" if streamed else ", SHARDLINE_STREAMED_LAYERS=auto"
        return Invalid(
            "SHARDLINE_SPLIT",
            f"weights{what} ({mib(held)}) and KV ({mib(kv_bytes)}) need "
            f"{mib(int(held * PACKING_FACTOR) + kv_bytes)}, "
            f"{mib(available)} are free{_promised(self._device)}",
            f"{few}{stream} or a smaller SHARDLINE_KV_MIB"
            + (", or a larger SHARDLINE_MEMORY_MIB" if self._limits.memory_bytes else ""),
        )

    def _check_host(self, weights: WeightBytes, streamed: tuple[int, ...]) -> int:
        """Returns the bytes of the host's memory that streamed layers take in addition to the
        device's. Raises Invalid if that has no room."""
        num_bytes = 0 if self._device.is_cpu else weights.of(streamed)
        free = self._device.host_bytes()
        if num_bytes > free:
            problem = (
                f"{len(streamed)} streamed layers of {self._device.name} lie in the host's memory "
                f"and need {mib(num_bytes)}, {mib(free)} are free{_promised(self._device)}"
            )
            raise Invalid(
                "SHARDLINE_STREAMED_LAYERS",
                problem,
                "Use more stages, fewer layers here or a smaller dtype",
            )
        return num_bytes

    @property
    def _offload_bytes(self) -> int:
        return self._limits.offload_bytes_on(self._device)

    def _kv_bytes(self) -> int:
        limits = self._limits
        if limits.kv_bytes is not None:
            return limits.kv_bytes
        # a limit leaves the rest to others
        share = limits.kv_share if limits.memory_bytes is None else 1.0
        return int((self._available_bytes() - self._offload_bytes) * share)

    def _available_bytes(self) -> int:
        """Free, and not beyond the limit."""
        available = self._device.available_bytes()
        if self._limits.memory_bytes is None:
            return available
        return max(0, min(available, self._limits.memory_bytes - self._taken))


def num_blocks(
    kv_shapes: Mapping[int, KvShape],
    dtype: torch.dtype,
    kv_bytes: int,
    *,
    context: int,
    max_open: int,
) -> int:
    """Returns the KV blocks that `kv_bytes` hold; at most those that all open sequences could use
    at full length.

    Raises Invalid if they do not hold one.
    """
    block_bytes = PagedKv.bytes_per_block(kv_shapes, dtype)
    most = max_open * blocks_for(context)
    if not block_bytes:  # no layer attends: a block is a number
        return min(most, max(blocks_for(context), MAX_EMPTY_BLOCKS))
    if kv_bytes < block_bytes:
        raise Invalid(
            "SHARDLINE_KV_MIB",
            f"{mib(kv_bytes)} hold no KV block of {mib(block_bytes)}",
            "Give more memory",
        )
    return min(kv_bytes // block_bytes, most)


def num_slots(slot_bytes: int, kv_bytes: int, *, max_open: int) -> int:
    """Returns the slots of states that a share of the memory of KV holds; at most one for each open
    sequence. Raises Invalid if it does not hold one."""
    share = int(kv_bytes * STATES_SHARE)
    if share < slot_bytes:
        raise Invalid(
            "SHARDLINE_KV_MIB",
            f"the share of states ({mib(share)}) holds no sequence's ({mib(slot_bytes)})",
            "Give more memory",
        )
    return min(share // slot_bytes, max_open)


def _promised(device: Device) -> str:
    others = device.reservations.others()
    return (
        f" in addition to the {mib(others)} that other stages of this host are about to take"
        if others
        else ""
    )


def mib(num_bytes: int) -> str:
    """Formats a number of bytes for error texts and logs, in MiB."""
    return f"{num_bytes / 2**20:,.1f} MiB"
