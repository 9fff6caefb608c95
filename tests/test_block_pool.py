"""Laws of one pool's books (group B of the peer's laws, where they concern plain KV blocks)."""

from __future__ import annotations

import random

import pytest

from xllm_hier.engine.blocks.pool import BlockPool
from xllm_hier.errors import InvariantError

ROOT = b"root"


def publish_chain(pool: BlockPool, names: str) -> list[int]:
    """READY, unpinned blocks `names[0]`, `names[:2]`, ... each the child of the one before."""
    blocks = pool.allocate(len(names)) or []
    for end in range(1, len(names) + 1):
        parent = names[: end - 1].encode() or ROOT
        assert pool.publish(blocks[end - 1], names[:end].encode(), parent)
    pool.unpin(blocks)
    return blocks


def test_ids_rise_from_zero_and_every_fresh_block_has_one_holder() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3) == [0, 1, 2]
    assert [pool.references(block) for block in range(3)] == [1, 1, 1]
    assert (pool.num_free, pool.num_pinned, pool.num_evictable) == (1, 3, 0)


def test_a_list_that_does_not_fit_is_refused_whole_and_evicts_nothing() -> None:
    pool = BlockPool(4)
    publish_chain(pool, "ab")
    assert pool.allocate(5) is None
    assert (pool.num_free, pool.num_evictable) == (2, 2)


def test_the_last_holder_of_an_unpublished_block_frees_it_and_of_a_ready_one_keeps_it_findable() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2) or []
    pool.publish(first, b"a", ROOT)
    pool.pin(first)
    pool.unpin([first, second])
    assert (pool.num_free, pool.num_pinned, pool.num_evictable) == (1, 1, 0)
    pool.unpin([first])
    assert pool.find(b"a") == first and pool.num_evictable == 1


def test_a_block_released_more_often_than_pinned_is_an_error_not_a_clamp() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1) or []
    pool.unpin([block])
    with pytest.raises(InvariantError, match="more often"):
        pool.unpin([block])
    with pytest.raises(InvariantError, match="free"):
        pool.pin(block)


def test_eviction_takes_the_least_recently_used_prefix_from_its_tail() -> None:
    pool = BlockPool(4)
    publish_chain(pool, "ab")
    publish_chain(pool, "xy")
    taken = pool.allocate(1) or []
    assert pool.find(b"ab") is None and pool.find(b"a") is not None
    taken += pool.allocate(1) or []
    assert pool.find(b"a") is None and pool.find(b"xy") is not None
    pool.check()


def test_a_match_makes_a_prefix_recently_used() -> None:
    pool = BlockPool(4)
    old = publish_chain(pool, "ab")
    publish_chain(pool, "xy")
    for block in old:
        pool.pin(block)
    pool.unpin(old)
    pool.allocate(2)
    assert pool.find(b"ab") is not None and pool.find(b"x") is None


def test_a_head_is_pinned_by_its_pinned_tail_and_evicted_after_it() -> None:
    pool = BlockPool(3)
    blocks = publish_chain(pool, "ab")
    pool.pin(blocks[1])  # a write-back of the tail alone is under way
    assert (pool.num_free, pool.num_pinned, pool.num_evictable) == (1, 2, 0)
    assert pool.allocate(1) is not None
    assert pool.allocate(1) is None, "nobody holds the head, but its child still stands on it"
    assert pool.find(b"a") == blocks[0]
    pool.unpin([blocks[1]])
    assert pool.allocate(1) is not None and pool.find(b"ab") is None and pool.find(b"a") is not None
    pool.check()


def test_an_allocation_that_is_refused_evicts_nothing_even_under_a_pinned_tail() -> None:
    pool = BlockPool(3)
    blocks = publish_chain(pool, "ab")
    publish_chain(pool, "x")
    pool.pin(blocks[1])
    assert pool.allocate(2) is None and pool.find(b"x") is not None


def test_ten_thousand_hits_on_one_block_leave_no_trace_in_the_books() -> None:
    pool = BlockPool(4)
    (block,) = publish_chain(pool, "a")
    for _ in range(10_000):
        pool.pin(block)
        pool.unpin([block])
    assert len(pool._leaves) < 200
    pool.check()


def test_equal_content_is_published_once_and_the_second_copy_stays_private() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2) or []
    assert pool.publish(first, b"a", ROOT)
    assert not pool.publish(second, b"a", ROOT)
    pool.unpin([second])
    assert pool.find(b"a") == first and pool.num_free == 1


def test_a_withdrawn_block_stays_with_its_holders_and_is_found_by_nobody() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1) or []
    pool.publish(block, b"a", ROOT)
    pool.withdraw(block)
    assert pool.find(b"a") is None and pool.num_pinned == 1
    pool.unpin([block])
    assert pool.num_free == 2
    pool.check()


def test_clear_empties_the_index_and_frees_all_that_nobody_holds() -> None:
    pool = BlockPool(4)
    blocks = publish_chain(pool, "abc")
    pool.pin(blocks[0])
    assert pool.clear() == 3
    assert (pool.num_free, pool.num_pinned) == (3, 1)
    pool.check()


def test_every_cached_block_can_be_evicted() -> None:
    pool = BlockPool(8)
    publish_chain(pool, "abcd")
    publish_chain(pool, "wxyz")
    assert len(pool.allocate(8) or []) == 8


def test_check_names_what_is_broken() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    pool._references[0] = 0
    with pytest.raises(InvariantError, match="FILLING with 0 references"):
        pool.check()


def test_the_books_balance_after_every_step_of_random_walks_on_eight_blocks() -> None:
    for seed in range(30):
        dice, pool = random.Random(seed), BlockPool(8)
        held: list[list[int]] = []
        names: dict[int, bytes] = {}
        for _ in range(150):
            move = dice.random()
            if move < 0.45:
                blocks = pool.allocate(dice.randrange(1, 4))
                if blocks is not None:
                    held.append(blocks)
                    parent = ROOT
                    for block in blocks:
                        if dice.random() < 0.8:
                            name = parent + bytes([dice.randrange(4)])
                            pool.publish(block, name, parent)
                            parent = name
            elif move < 0.7 and held:
                pool.unpin(held.pop(dice.randrange(len(held))))
            elif move < 0.85:
                found = [block for block in map(pool.find, names.values()) if block is not None]
                if found:
                    block = dice.choice(found)
                    pool.pin(block)
                    held.append([block])
            elif move < 0.95 and held:
                pool.withdraw(dice.choice(dice.choice(held)))
            names = {block: name for name, block in pool.contents().items()}
            pool.check()
        for blocks in held:
            pool.unpin(blocks)
        pool.clear()
        pool.check()
        assert pool.num_free == 8
