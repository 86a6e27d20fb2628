"""KV blocks: who holds which. The head's scheduler alone allocates; stages only index. Knows no tensor and no torch.

One block is `BLOCK_TOKENS` token places in every layer of every stage, so one pool counts for the whole pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardline.rounding import ceil_div

BLOCK_TOKENS = 64


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold this many tokens."""
    return ceil_div(num_tokens, BLOCK_TOKENS)


class BlockPool:
    """Block numbers `0 … num_blocks - 1`. The block freed last is handed out first: its memory is warm."""

    __slots__ = ("_free", "_is_used", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_used = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold."""
        return self.num_blocks - len(self._free)

    def can_allocate(self, num: int) -> bool:
        """True when `allocate(num)` would succeed."""
        return num <= len(self._free)

    def allocate(self, num: int) -> tuple[int, ...]:
        """Takes `num` blocks. Ask `can_allocate` first."""
        assert num <= len(self._free), f"{num} KV blocks asked for, {len(self._free)} free"
        blocks = tuple(self._free.pop() for _ in range(num))
        for block in blocks:
            self._is_used[block] = 1
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Gives blocks back. Each must be in use."""
        for block in blocks:
            assert self._is_used[block], f"KV block {block} freed twice"
            self._is_used[block] = 0
            self._free.append(block)
