"""The block pool hands every block to one holder at a time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.stage.scheduling.kv_blocks import BLOCK_TOKENS, BlockPool, blocks_for


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"),
    [(0, 0), (1, 1), (BLOCK_TOKENS, 1), (BLOCK_TOKENS + 1, 2), (10 * BLOCK_TOKENS, 10)],
)
def test_tokens_round_up_to_whole_blocks(num_tokens: int, num_blocks: int) -> None:
    assert blocks_for(num_tokens) == num_blocks


def test_allocated_blocks_are_distinct_and_counted() -> None:
    pool = BlockPool(5)

    first, second = pool.allocate(2), pool.allocate(3)

    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert (pool.num_used, pool.num_free) == (5, 0)
    assert not pool.can_allocate(1)


def test_a_full_pool_refuses_and_keeps_its_state() -> None:
    pool = BlockPool(2)
    pool.allocate(1)

    with pytest.raises(AssertionError, match="2 KV blocks asked for, 1 free"):
        pool.allocate(2)

    assert pool.num_free == 1


def test_freeing_twice_is_our_own_bug() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.free(blocks)

    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)


@given(st.integers(0, 30), st.lists(st.integers(0, 8), max_size=40))
def test_no_block_is_ever_held_twice_or_lost(num_blocks: int, sizes: list[int]) -> None:
    pool = BlockPool(num_blocks)
    held: list[tuple[int, ...]] = []
    for size in sizes:
        if pool.can_allocate(size):
            held.append(pool.allocate(size))
        elif held:
            pool.free(held.pop(0))
        taken = [block for blocks in held for block in blocks]
        assert len(taken) == len(set(taken)) == pool.num_used
        assert pool.num_used + pool.num_free == num_blocks
    for blocks in held:
        pool.free(blocks)
    assert pool.num_free == num_blocks
