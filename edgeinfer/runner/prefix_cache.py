"""The prefix cache: blocks of a pool that are found again by their tokens and all tokens before them."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from hashlib import sha256
from itertools import chain
from typing import Protocol

from edgeinfer.memory_planner import BlockPool


class Table(Protocol):
    """Block table of a sequence: `Sequence` or `WindowTable`."""

    blocks: list[int]
    listed: int


def prefix_keys(origin: bytes, ids: Items[int], n_blocks: int, block_tokens: int) -> Iterator[bytes]:
    """Yield the key of each of the first blocks of a text: the hash of its tokens and of the key before.

    Parameters
    ----------
    origin : all else that K and V depend on, and a salt that keeps texts apart
    ids : at least n_blocks * block_tokens
    """
    key = root_key(origin)
    for start in range(0, n_blocks * block_tokens, block_tokens):
        key = sha256(key + struct.pack(f"<{block_tokens}q", *ids[start : start + block_tokens])).digest()
        yield key


def root_key(origin: bytes) -> bytes:
    """Return the key of the empty text."""
    return sha256(origin).digest()


def tail_key(parent: bytes, ids: Items[int]) -> bytes:
    """Return the key of tokens that fill no block, by that of the blocks before them."""
    return sha256(parent + struct.pack(f"<{len(ids)}q", *ids)).digest()


class PrefixCache(BlockPool):
    """A pool whose blocks are free, held by sequences, or cached; a cached block may be held, too.

    The cache is one more holder of each of its blocks, so they are copied on write (`is_shared`). When no block is
    free, `take` evicts one that the cache alone holds: the one that was released first. A sequence holds the cached
    blocks of its whole beginning and releases the last one first, so leaves go before their ancestors.
    """

    def __init__(self, n_blocks: int, block_tokens: int):
        super().__init__(n_blocks, block_tokens)
        self._cached: dict[bytes, int] = {}
        """Blocks by their keys."""
        self._keys: dict[int, bytes] = {}
        """Keys of the blocks that the cache holds; all blocks in `_cached` are among them."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Blocks that no sequence holds, least recently released first."""

    # As in block_tables.py a block can be lost where Ctrl-C comes, but never be free while a table or a key names it:
    # `_keys` has a block before `_cached` does, and keeps it longer. Lost blocks come back with `recount`.

    @property
    def n_cached(self) -> int:
        """Number of cached blocks, held by sequences or not."""
        return len(self._keys)

    @property
    def n_available(self) -> int:
        """Number of blocks that `take` can give: free ones, and those that the cache alone holds."""
        return len(self._free) + len(self._idle)

    def is_own(self, block: int) -> bool:
        """True if the block is available once its holder frees it."""
        return self._holders[block] - (block in self._keys) == 1

    def is_cached(self, block: int) -> bool:
        """Return whether the cache holds a block."""
        return block in self._keys

    def find(self, key: bytes) -> int | None:
        """Return the block that is cached under a key."""
        return self._cached.get(key)

    def enter(self, key: bytes, table: Table, number: int) -> None:
        """Cache a full block of a table; where its key has a block already, that one takes its place in the table."""
        block, cached = table.blocks[number], self._cached.get(key)
        if cached is None and block not in self._keys:  # with another salt it has another key already
            self.share(block)
            self._keys[block] = key
            self._cached[key] = block
        elif cached is not None and cached != block:
            self.share(cached)
            table.listed = min(table.listed, number)
            table.blocks[number] = cached
            self.drop(block)

    def entries(self) -> list[tuple[bytes, int]]:
        """Return keys and blocks: the last ones to be evicted first, each before its successors."""
        blocks = [block for block in self._keys if block not in self._idle]
        return [(self._keys[block], block) for block in (*blocks, *reversed(self._idle))]

    def adopt(self, blocks: Mapping[bytes, int]) -> None:
        """Cache blocks that the caller has taken, under new keys, in the order of `entries`."""
        for key, block in blocks.items():
            self._keys[block] = key
            self._cached[key] = block
        for block in reversed([*blocks.values()]):
            self._idle[block] = None

    def clear(self) -> None:
        """Drop all cached blocks; sequences keep theirs."""
        self._cached.clear()
        self._idle.clear()
        while self._keys:
            super().drop(self._keys.popitem()[0])

    def take(self) -> int:
        """A block of one's own, evicted from the cache if none is free; raises `RequestError` if all are held."""
        if not self._free and self._idle:
            block, _ = self._idle.popitem(last=False)
            if self._cached.get(key := self._keys[block]) == block:  # but for an interruption
                del self._cached[key]
            del self._keys[block]
            super().drop(block)
        return super().take()

    def share(self, block: int) -> None:
        """One more holder of a block."""
        self._idle.pop(block, None)
        super().share(block)

    def drop(self, block: int) -> None:
        """One holder less; the last one frees the block, or leaves it to the cache."""
        super().drop(block)
        if self._holders[block] == 1 and block in self._keys:
            self._idle[block] = None

    def recount(self, tables: Iterable[list[int]]) -> None:
        """Count the holders again from all block tables there are, and the cache's own: frees blocks that none of them
        names.
        """
        super().recount(chain(tables, (list(self._keys),)))
        idle = (block for block in (*self._idle, *reversed(self._keys)) if self._holders[block] == 1)
        self._idle = OrderedDict.fromkeys(idle)
