"""The prefix cache by itself: keys, holders, the order of eviction, and a recount."""

from __future__ import annotations

import pytest

from edgeinfer.errors import RequestError
from edgeinfer.runner import Sequence
from edgeinfer.runner.prefix_cache import PrefixCache, prefix_keys

SIZE = 4
"""Tokens of a block."""


def keys(text: str, origin: bytes = b"") -> list[bytes]:
    """Keys of the full blocks of a text, whose letters are its tokens."""
    return [*prefix_keys(origin, [*map(ord, text)], len(text) // SIZE, SIZE)]


def held(pool: PrefixCache, text: str) -> Sequence:
    """Return a sequence with the cached beginning of a text, whose other full blocks are taken and cached, too."""
    table = Sequence()
    for key in keys(text):
        if (block := pool.find(key)) is None:
            table.blocks.append(pool.take())
        else:
            pool.share(block)
            table.blocks.append(block)
        pool.enter(key, table, len(table.blocks) - 1)
    return table


def release(pool: PrefixCache, table: Sequence) -> None:
    for block in reversed(table.blocks):
        pool.drop(block)
    table.blocks.clear()


def cached(pool: PrefixCache, text: str) -> int:
    """Return how many of the blocks of a text are cached, from the first one on."""
    return next((n for n, key in enumerate(keys(text)) if pool.find(key) is None), len(text) // SIZE)


def test_a_key_depends_on_all_tokens_before_and_on_the_origin() -> None:
    first, second = keys("aaaabbbb")
    assert keys("aaaabbbbcccc")[:2] == [first, second] and len(first) == 32
    assert keys("aaaa") == [first]
    assert second not in keys("bbbbbbbb") + keys("abaabbbb") + keys("aaaabbbb", b"salt")
    assert keys("aaa") == []


def test_a_block_is_free_held_or_cached() -> None:
    pool = PrefixCache(3, SIZE)
    table = held(pool, "aaaabbbb")
    assert (pool.n_free, pool.n_cached, pool.n_available) == (1, 2, 1)
    assert all(pool.is_shared(block) and pool.is_own(block) for block in table.blocks)
    blocks = [*table.blocks]
    release(pool, table)
    assert (pool.n_free, pool.n_cached, pool.n_available) == (1, 2, 3)
    again = held(pool, "aaaabbbb")
    assert again.blocks == blocks and pool.n_available == 1
    pool.clear()
    assert (pool.n_free, pool.n_cached) == (1, 0) and not pool.is_shared(blocks[0])
    release(pool, again)
    assert pool.n_free == 3


def test_what_was_released_first_is_evicted_first_and_leaves_before_what_they_follow() -> None:
    pool = PrefixCache(6, SIZE)
    for text in ("aaaabbbbcccc", "aaaabbbbdddd", "eeeeffff"):  # two that share a beginning, and a newer one
        release(pool, held(pool, text))
    order = []
    for _ in range(6):
        pool.take()
        order.append([cached(pool, text) for text in ("aaaabbbbcccc", "aaaabbbbdddd", "eeeeffff")])
    assert order == [[2, 3, 2], [2, 2, 2], [1, 1, 2], [0, 0, 2], [0, 0, 1], [0, 0, 0]]
    with pytest.raises(RequestError, match=r"^All 6 KV blocks of 4 tokens are in use"):
        pool.take()


def test_a_hit_makes_its_beginning_the_last_to_go() -> None:
    pool = PrefixCache(4, SIZE)
    for text in ("aaaabbbb", "ccccdddd", "aaaabbbb"):
        release(pool, held(pool, text))
    pool.take(), pool.take()
    assert (cached(pool, "aaaabbbb"), cached(pool, "ccccdddd")) == (2, 0)


def test_what_a_sequence_holds_is_not_evicted() -> None:
    pool = PrefixCache(4, SIZE)
    table = held(pool, "aaaabbbb")
    release(pool, held(pool, "ccccdddd"))
    pool.take(), pool.take()
    assert pool.n_available == 0 and cached(pool, "aaaabbbb") == 2
    with pytest.raises(RequestError):
        pool.take()
    release(pool, table)
    assert pool.n_available == 2


def test_sequences_that_ran_beside_each_other_come_to_share() -> None:
    pool, first, second = PrefixCache(6, SIZE), Sequence(), Sequence()
    for table in (first, second):
        table.blocks, table.listed = [pool.take(), pool.take()], 2
    for table in (first, second):
        for number, key in enumerate(keys("aaaabbbb")):
            pool.enter(key, table, number)
    assert first.blocks == second.blocks and (first.listed, second.listed) == (2, 0)
    assert (pool.n_free, pool.n_cached) == (4, 2)
    release(pool, first)
    assert pool.n_available == 4
    release(pool, second)
    assert pool.n_available == 6


def test_a_block_is_cached_for_the_salt_that_came_first() -> None:
    pool = PrefixCache(2, SIZE)
    table = held(pool, "aaaa")
    pool.enter(keys("aaaa", b"salt")[0], table, 0)
    assert pool.find(keys("aaaa", b"salt")[0]) is None and pool.find(keys("aaaa")[0]) == table.blocks[0]


def test_a_recount_keeps_what_is_cached_and_finds_what_was_forgotten() -> None:
    pool = PrefixCache(5, SIZE)
    kept, forgotten = held(pool, "aaaabbbb"), held(pool, "ccccdddd")
    pool.take()
    assert pool.n_available == 0
    pool.recount([kept.blocks])
    assert (pool.n_free, pool.n_available, pool.n_cached) == (1, 3, 4)
    assert cached(pool, "aaaabbbb") == cached(pool, "ccccdddd") == 2
    pool.take(), pool.take()
    assert cached(pool, "ccccdddd") == 1, "the last block of what was forgotten goes first"
    assert pool.find(keys("ccccdddd")[0]) == forgotten.blocks[0]
    assert all(pool.is_shared(block) for block in kept.blocks)


def test_entries_are_taken_over_in_the_same_order() -> None:
    pool, other = PrefixCache(6, SIZE), PrefixCache(6, SIZE)
    for text in ("aaaabbbb", "ccccdddd"):
        release(pool, held(pool, text))
    table = held(pool, "eeee")
    entries = pool.entries()
    assert [key for key, _ in entries] == keys("eeee") + keys("ccccdddd") + keys("aaaabbbb")
    other.adopt({key: other.take() for key, _ in entries})
    assert [key for key, _ in other.entries()] == [key for key, _ in entries]
    assert other.n_available == 6 and other.n_free == 1
    release(pool, table)
