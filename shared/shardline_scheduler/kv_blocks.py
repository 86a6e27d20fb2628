"""KV blocks: who holds which. The head's scheduler alone allocates; stages only index. Knows no
tensor and no torch.

One block is `BLOCK_TOKENS` token places in every layer of every stage, so one pool counts for the
whole pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from shardline.base.rounding import ceil_div

BLOCK_TOKENS = 64


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold this many tokens."""
    return ceil_div(num_tokens, BLOCK_TOKENS)


class BlockPool:
    """Block numbers `0 … num_blocks - 1`. A block is held by sequences, or kept for what is in it,
    or free.

    A free block is handed out before a kept one: the one freed last first, its memory is warm. Of
    the kept ones the one that was not held for longest goes first; `on_evict` is called with it
    before it goes.
    """

    __slots__ = (
        "_block_of",
        "_free",
        "_kept",
        "_name_of",
        "_num_holders",
        "_on_evict",
        "num_blocks",
    )

    def __init__(
        self, num_blocks: int, on_evict: Callable[[int, bytes], None] = lambda _block, _name: None
    ) -> None:
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_holders = [0] * num_blocks
        self._kept: dict[int, None] = {}
        """Named blocks that no sequence holds, longest unused first."""
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Counts the blocks that can be allocated: no sequence holds them."""
        return len(self._free) + len(self._kept)

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold."""
        return self.num_blocks - self.num_free

    def can_allocate(self, num: int) -> bool:
        """True when `allocate(num)` would succeed."""
        return num <= self.num_free

    def allocate(self, num: int) -> tuple[int, ...]:
        """Takes `num` blocks, and forgets their content. Ask `can_allocate` first."""
        assert num <= self.num_free, f"{num} KV blocks asked for, {self.num_free} free"
        return tuple(self._take() for _ in range(num))

    def share(self, blocks: Iterable[int]) -> None:
        """One more sequence holds these, which were found by name."""
        for block in blocks:
            self._kept.pop(block, None)
            self._num_holders[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """One holder gives its blocks back. The first, which begin its prefix, are kept longest."""
        for block in reversed(blocks):
            assert self._num_holders[block], f"KV block {block} freed twice"
            self._num_holders[block] -= 1
            if self._num_holders[block]:
                continue
            if block in self._name_of:
                self._kept[block] = None
            else:
                self._free.append(block)

    def is_held(self, block: int) -> bool:
        """Whether a sequence holds it."""
        return self._num_holders[block] > 0

    def name(self, block: int, name: bytes) -> None:
        """Makes a held block's content known by its name, unless another block has it."""
        if name not in self._block_of and block not in self._name_of:
            self._block_of[name], self._name_of[block] = block, name

    def find(self, name: bytes) -> int | None:
        """The block that has this content."""
        return self._block_of.get(name)

    def forget(self, blocks: Iterable[int]) -> None:
        """Forgets the content of held blocks: no other sequence is to find it."""
        for block in blocks:
            if (name := self._name_of.pop(block, None)) is not None:
                del self._block_of[name]

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block = next(iter(self._kept))
            del self._kept[block]
            self._on_evict(block, self._name_of[block])
            self.forget([block])
        self._num_holders[block] = 1
        return block
