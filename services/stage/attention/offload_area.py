"""The offload area of one stage: slots that hold copies of KV blocks, in host memory or in a file.
Decides nothing."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from services.stage.attention.paged_kv import PagedKv
from shardline.base.clock import monotonic_s
from shardline.base.errors import Invalid, ProtocolError
from shardline_scheduler.offload import NO_OFFLOAD, OffloadTerms
from shardline_scheduler.step_plan import Move

TRIAL_BYTES = 16 << 20
NUM_TRIALS = 3


class OffloadArea:
    """Has the slots that `num_bytes` hold, allocated at once in a file in `folder`; without one in
    host memory, which is pinned if `kv` is on an accelerator. Raises Invalid if the disk or the
    memory does not hold them."""

    def __init__(
        self,
        kv: PagedKv,
        num_bytes: int,
        folder: Path | None = None,
        *,
        synchronize: Callable[[], None] = lambda: None,
    ) -> None:
        """Allocates the slots. `synchronize` waits for the device of `kv`."""
        self._kv = kv
        self._synchronize = synchronize
        is_far = any(keys.device.type != "cpu" for keys in kv.keys.values())
        block_bytes = PagedKv.bytes_per_block(kv.shapes, kv.dtype)
        self.num_slots = num_bytes // block_bytes if block_bytes else 0
        self._parts: list[tuple[Tensor, Tensor]] = []
        """Of each tensor of KV: itself, [blocks, Hk, 64, …], and its slots, [slots, Hk, 64, …]."""
        self.terms = NO_OFFLOAD
        if not self.num_slots:
            return
        num_bytes = self.num_slots * block_bytes
        disk_s = 0.0
        if folder is None:
            memory = _in_memory(num_bytes, pinned=is_far)
        else:
            memory, disk_s = _in_file(num_bytes, folder)
        slots = memory.view(self.num_slots, block_bytes)
        end = 0
        for tensor in (*kv.keys.values(), *kv.values.values()):
            begin = end
            end = end + tensor[0].nbytes
            self._parts.append(
                (tensor, slots[:, begin:end].view(kv.dtype).unflatten(1, tensor.shape[1:]))
            )
        self.terms = OffloadTerms(
            num_slots=self.num_slots, move_s=self._try_move() + disk_s * block_bytes
        )

    def move(self, moves: Sequence[Move]) -> None:
        """Copies blocks to slots and back, one after the other.

        Raises ProtocolError for those that do not exist, and for more than a step can have: a block
        goes once and comes once.
        """
        if len(moves) > 2 * self._kv.num_blocks:
            raise ProtocolError(
                f"{len(moves)} moves in a step, with {self._kv.num_blocks} KV blocks"
            )
        for move in moves:
            if move.block >= self._kv.num_blocks or move.slot >= self.num_slots:
                raise ProtocolError(
                    f"KV block {move.block} and slot {move.slot} are not both among the "
                    f"{self._kv.num_blocks} blocks and {self.num_slots} slots of this stage"
                )
        for move in moves:
            for blocks, slots in self._parts:
                if move.is_out:
                    slots[move.slot].copy_(blocks[move.block], non_blocking=True)
                else:
                    blocks[move.block].copy_(slots[move.slot], non_blocking=True)

    def _try_move(self) -> float:
        """Seconds in which a block goes to a slot and comes back."""
        times_s = []
        for _ in range(NUM_TRIALS):
            began_s = monotonic_s()
            self.move([Move(0, 0, is_out=True), Move(0, 0, is_out=False)])
            self._synchronize()
            times_s.append(monotonic_s() - began_s)
        return min(times_s)


def _in_memory(num_bytes: int, *, pinned: bool) -> Tensor:
    """uint8 [num_bytes], touched, so that memory never runs out later."""
    try:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned)
    except RuntimeError as error:
        raise _too_large(num_bytes, "this host's memory", str(error)) from error


def _in_file(num_bytes: int, folder: Path) -> tuple[Tensor, float]:
    """uint8 [num_bytes] in a file without a name, which ends with the process; seconds for a byte
    there and back."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            byte_s = _try_disk(file.fileno(), min(num_bytes, TRIAL_BYTES))
            return torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8), byte_s
    except OSError as error:
        raise _too_large(num_bytes, str(folder), error.strerror or str(error)) from error


def _try_disk(file: int, num_bytes: int) -> float:
    """Seconds in which a byte is written and read: as if the page cache had no room for it."""
    began_s = monotonic_s()
    os.pwrite(file, bytes(num_bytes), 0)
    os.fdatasync(file)
    os.posix_fadvise(file, 0, num_bytes, os.POSIX_FADV_DONTNEED)
    os.pread(file, num_bytes, 0)
    return (monotonic_s() - began_s) / num_bytes


def _too_large(num_bytes: int, where: str, reason: str) -> Invalid:
    return Invalid(
        "SHARDLINE_KV_OFFLOAD_MIB",
        f"{num_bytes / 2**20:,.1f} MiB do not fit into {where}: {reason}",
        "Give less, or name a folder with more room in SHARDLINE_KV_OFFLOAD_DIR",
    )
