"""The block pool hands every block to one holder at a time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline_scheduler.kv_blocks import BLOCK_TOKENS, BlockPool, blocks_for


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"),
    [(0, 0), (1, 1), (BLOCK_TOKENS, 1), (BLOCK_TOKENS + 1, 2), (10 * BLOCK_TOKENS, 10)],
)
def test_tokens_round_up_to_whole_blocks(num_tokens: int, num_blocks: int) -> None:
    assert blocks_for(num_tokens) == num_blocks


def test_allocated_blocks_are_distinct_and_counted() -> None:
    pool = BlockPool(5)

    first = pool.allocate(2)
    second = pool.allocate(3)

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


def test_a_block_with_a_name_is_found_and_shared_until_all_holders_have_gone() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    pool.name(first, b"one")

    pool.share([first])
    pool.free([first, second])
    assert (pool.num_used, pool.find(b"one")) == (1, first)

    pool.free([first])
    assert (pool.num_used, pool.num_free, pool.find(b"one")) == (0, 3, first)


def test_kept_blocks_are_handed_out_last_the_longest_unused_first() -> None:
    pool = BlockPool(4)
    begin, end, other, bare = pool.allocate(4)
    for block, name in ((begin, b"begin"), (end, b"end"), (other, b"other")):
        pool.name(block, name)
    pool.free([begin, end])
    pool.free([other])
    pool.free([bare])

    assert pool.allocate(4) == (bare, end, begin, other)
    assert [pool.find(name) for name in (b"begin", b"end", b"other")] == [None] * 3


def test_the_first_block_of_a_name_keeps_it() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.name(first, b"one")
    pool.name(second, b"one")

    pool.free([first])
    assert pool.allocate(1) == (first,)
    assert pool.find(b"one") is None, "its block has other content now"


def test_a_forgotten_block_is_free_when_its_holder_has_gone() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.name(block, b"one")
    pool.forget([block])
    pool.free([block])

    assert (pool.find(b"one"), pool.num_free) == (None, 1)


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
