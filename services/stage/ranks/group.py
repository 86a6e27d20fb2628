"""One process's place among the ranks of a stage, and the memory through which they share what they
compute.

Each rank computes some outputs of a product and reads all of them: a sum is never cut in two, so a
row has the bits that one process alone would give it. Knows no model.

Letters of shapes: T packed rows, N numbers of a row.
"""

from __future__ import annotations

import mmap
import os
from ctypes import byref

import torch
from torch import Tensor

from services.stage.kernels.kernel import Kernel, Ranks
from shardline.base.rounding import ceil_div, round_up

LINE_BYTES = 64
"""Of the memory in which a rank counts its meetings."""
WORD = torch.int64


class RankGroup:
    """All ranks call its methods in the same order, each in one thread. Waits without end: who
    starts the ranks watches that none is missing."""

    def __init__(self, rank: int, num_ranks: int, memory: int) -> None:
        """`memory` is a file descriptor of memory that all ranks have."""
        self.rank = rank
        self.num_ranks = num_ranks
        self._file = memory
        self._kernel: Kernel | None = None
        self._map: mmap.mmap | None = None
        self.call = Ranks(rank=rank, num_ranks=num_ranks)
        """As the kernel reads it."""

    def open(self, kernel: Kernel, buffer_bytes: int) -> None:
        """Takes two buffers of at least `buffer_bytes`, the same number on every rank. All ranks
        are here at once."""
        buffer_bytes = round_up(max(buffer_bytes, LINE_BYTES), mmap.PAGESIZE)
        size = mmap.PAGESIZE + 2 * buffer_bytes
        os.ftruncate(self._file, max(size, os.fstat(self._file).st_size))
        self._kernel, self._map = kernel, mmap.mmap(self._file, size)
        memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self._buffers = memory[mmap.PAGESIZE :].view(2, buffer_bytes)
        self.call.arrived, self.call.buffers = memory.data_ptr(), self._buffers.data_ptr()
        self.call.buffer_bytes = buffer_bytes
        self._meet()

    def share_of(self, num: int, unit: int = 1) -> range:
        """Returns which of `num` numbers are this rank's: equal shares of whole units, but for the
        last ones."""
        share = self._share(num, unit)
        return range(min(num, self.rank * share), min(num, (self.rank + 1) * share))

    def can_share(self, num: int, unit: int = 1) -> bool:
        """Returns whether each rank gets some of `num` numbers."""
        return (self.num_ranks - 1) * self._share(num, unit) < num

    def gather(self, mine: Tensor, share: range, num: int) -> Tensor:
        """Returns rows [..., N] with the numbers of all ranks, of which `mine` [..., n], of any
        dtype, are this one's share; `num` is N."""
        rows = mine.reshape(-1, mine.shape[-1])
        at_once = max(1, self.call.buffer_bytes // (num * mine.itemsize))
        parts = [self._gather(part, share, num) for part in rows.split(at_once)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(*mine.shape[:-1], num)

    def send(self, x: Tensor) -> None:
        """Gives a tensor [...] of any dtype to the other ranks, which `receive` it."""
        self._buffer(x.shape, x.dtype).copy_(x)
        self._meet()

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns the tensor [...] of this shape and dtype that another rank sends."""
        sent = self._buffer(shape, dtype)
        self._meet()
        return sent.clone()

    def tell(self, value: int | None) -> int:
        """Returns the value of the one rank that has one."""
        if value is None:
            return int(self.receive((1,), WORD))
        self.send(torch.tensor([value], dtype=WORD, device="cpu"))
        return value

    def leave(self) -> None:
        """Lets no other rank wait for this one any more: what they put together from now on is
        worth nothing."""
        counters = torch.frombuffer(
            self._map, dtype=WORD, count=self.num_ranks * LINE_BYTES // WORD.itemsize
        )
        counters[self.rank * LINE_BYTES // WORD.itemsize] = torch.iinfo(WORD).max

    def _share(self, num: int, unit: int) -> int:
        return ceil_div(ceil_div(num, unit), self.num_ranks) * unit

    def _gather(self, mine: Tensor, share: range, num: int) -> Tensor:
        together = self._buffer((len(mine), num), mine.dtype)
        together[:, share.start : share.stop] = mine
        self._meet()
        return together.clone()

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The one that no rank reads any more."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        assert num_bytes <= self.call.buffer_bytes, (
            f"{num_bytes} bytes in a buffer of {self.call.buffer_bytes}"
        )
        return self._buffers[self.call.num_meetings % 2, :num_bytes].view(dtype).view(shape)

    def _meet(self) -> None:
        assert self._kernel is not None, "the group is not open"
        self._kernel.meet(byref(self.call))
