"""Sequences over a pool of KV blocks: block tables, common beginnings, copy on write, whatever the memory is."""

from __future__ import annotations

import abc
import weakref
from collections.abc import Sequence as Items

from ..base.validation import shown
from ..errors import RequestError
from .prefix_cache import PrefixCache, prefix_keys
from .sequences import Sequence


class Sequences(abc.ABC):
    """The sequences of one runner, and their blocks of its KV cache."""

    def __init__(self) -> None:
        self._living: weakref.WeakSet[Sequence] = weakref.WeakSet()

    def new(self) -> Sequence:
        """Return an empty sequence."""
        sequence = Sequence()
        self._living.add(sequence)
        return sequence

    def check_own(self, sequence: Sequence) -> None:
        """Refuse a sequence of another runner: its block numbers mean nothing here."""
        if sequence not in self._living:
            raise RequestError("The sequence belongs to another model that is open; a sequence is used where it was "
                               "made (new_sequence, fork, load).")

    def truncate(self, sequence: Sequence, n_tokens: int) -> None:
        """Forget all tokens but the first n."""
        self.check_own(sequence)
        if not 0 <= n_tokens <= len(sequence.tokens):
            raise RequestError(f"Cannot cut a sequence of {len(sequence.tokens)} tokens to {shown(n_tokens)}.")
        sequence.reserved = 0
        sequence.cut = sequence.cut or n_tokens < len(sequence.tokens)
        del sequence.tokens[n_tokens:]
        if sequence.decoded is not None and sequence.decoded >= n_tokens:
            sequence.decoded = None
        self.trim(sequence)

    def can_truncate(self, sequence: Sequence, n_tokens: int) -> int:
        """Return the most of the first n tokens that a sequence can be cut to."""
        return n_tokens

    @abc.abstractmethod
    def fork(self, sequence: Sequence) -> Sequence:
        """Return a sequence with the same tokens that goes its own way from here."""

    @abc.abstractmethod
    def extend(self, sequence: Sequence, n_tokens: int) -> None:
        """Make room for n more tokens; raises `RequestError` if there is none."""

    @abc.abstractmethod
    def fits(self, wanted: Items[tuple[Sequence, int]]) -> bool:
        """Return whether `extend` finds room for this many more tokens of each of several sequences."""

    @abc.abstractmethod
    def trim(self, sequence: Sequence) -> None:
        """Free blocks after the last token, also those of a cancelled forward pass."""

    # Nothing is cached unless a class overrides these; `origin` is that of `prefix_keys`.

    @property
    def n_cached(self) -> int:
        """Number of cached blocks."""
        return 0

    def from_prefix(self, ids: Items[int], origin: bytes) -> Sequence:
        """Return a sequence with the longest cached beginning of a text that leaves a token over."""
        return self.new()

    def cache_prefix(self, sequence: Sequence, n_tokens: int, origin: bytes) -> None:
        """Cache the full blocks of the first n tokens; the sequence keeps them."""
        self.check_own(sequence)

    def drop_prefixes(self) -> None:
        """Empty the cache."""
        return


class BlockTables(Sequences):
    """Sequences that hold blocks of one pool, and share those of their common beginnings until one of them writes.

    Parameters
    ----------
    n_blocks, block_tokens : of the pool
    """

    def __init__(self, n_blocks: int, block_tokens: int):
        super().__init__()
        self.pool, self.block_tokens = PrefixCache(n_blocks, block_tokens), block_tokens

    # Ctrl-C may come between any two of these lines. Their order sees to it that a block can then be lost, but never be
    # free while a block table or the cache names it; lost blocks come back when the pool is empty.

    def extend(self, sequence: Sequence, n_tokens: int) -> None:
        """Make room for n more tokens: a shared last block is copied, new blocks are taken.

        Raises `RequestError` if all blocks are held.
        """
        sequence.reserved = 0
        self.trim(sequence)
        blocks, used = sequence.blocks, len(sequence.tokens)
        if rows := used % self.block_tokens:
            self.own(sequence, len(blocks) - 1)
            if sequence.cut:
                self.clear(blocks[-1], rows)
        sequence.cut = True  # until all of these rows are written and appended
        for _ in range(len(blocks), -(-(used + n_tokens) // self.block_tokens)):
            blocks.append(self.take())

    def fits(self, wanted: Items[tuple[Sequence, int]]) -> bool:
        """Return whether `extend` finds blocks for this many more tokens of each of several sequences."""
        needed, size = 0, self.block_tokens
        for sequence, n in wanted:
            used, blocks = len(sequence), sequence.blocks
            needed += max(0, -(-(used + n) // size) - len(blocks))
            needed += used % size > 0 and self.pool.is_shared(blocks[used // size])  # which is copied
        return needed <= self.pool.n_available

    def own(self, sequence: Sequence, number: int) -> None:
        """Copy a block of the sequence that others share."""
        shared = sequence.blocks[number]
        if self.pool.is_shared(shared):
            copy = self.take()
            self.copy(shared, copy)
            sequence.listed = min(sequence.listed, number)
            sequence.blocks[number] = copy
            self.pool.drop(shared)

    def take(self) -> int:
        """A block of one's own; if none is free or evicted, those that no living sequence names are."""
        if not self.pool.n_available:
            self.pool.recount(sequence.blocks for sequence in self._living)
        return self.pool.take()

    def fork(self, sequence: Sequence) -> Sequence:
        """Return a sequence with the same tokens that shares all blocks until one of the two writes."""
        self.check_own(sequence)
        self.trim(sequence)
        copy = self.new()
        for block in sequence.blocks:
            self.pool.share(block)
        copy.tokens, copy.blocks = list(sequence.tokens), list(sequence.blocks)
        copy.decoded, copy.cut, copy.unlike = sequence.decoded, sequence.cut, sequence.unlike
        return copy

    def trim(self, sequence: Sequence) -> None:
        """Free blocks after the last token or reserved place, also those of a cancelled forward pass."""
        keep = -(-(len(sequence.tokens) + sequence.reserved) // self.block_tokens)
        if keep < len(sequence.blocks):
            sequence.listed = min(sequence.listed, keep)
            gone = sequence.blocks[keep:]
            del sequence.blocks[keep:]
            for block in reversed(gone):  # so that the cache evicts the last first
                self.pool.drop(block)

    # -- cached beginnings -------------------------------------------------------------------------------------------

    @property
    def n_cached(self) -> int:
        """Number of cached blocks."""
        return self.pool.n_cached

    def from_prefix(self, ids: Items[int], origin: bytes) -> Sequence:
        """Return a sequence that shares the cached blocks of the longest beginning of a text, without its last token.
        """
        sequence, found = self.new(), list[bytes]()
        for key in prefix_keys(origin, ids, (len(ids) - 1) // self.block_tokens, self.block_tokens):
            if self.pool.find(key) is None:
                break
            found.append(key)
        found = found[: self.usable(found)]
        self.share_cached(sequence, found)
        sequence.tokens = list(ids[: len(found) * self.block_tokens])
        return sequence

    def cache_prefix(self, sequence: Sequence, n_tokens: int, origin: bytes) -> None:
        """Cache the full blocks of the first n tokens; the sequence keeps them, or those that were cached before."""
        self.check_own(sequence)
        keys = prefix_keys(origin, sequence.tokens, n_tokens // self.block_tokens, self.block_tokens)
        for number, key in enumerate(keys):
            self.enter(sequence, number, key)

    def drop_prefixes(self) -> None:
        """Empty the cache."""
        self.pool.clear()

    def usable(self, keys: Items[bytes]) -> int:
        """Return how many of the first cached blocks of a text a sequence can continue from."""
        return len(keys)

    def share_cached(self, sequence: Sequence, keys: Items[bytes]) -> None:
        """Give an empty sequence the blocks that are cached under keys."""
        for key in keys:
            block = self.pool.find(key)
            assert block is not None
            self.pool.share(block)
            sequence.blocks.append(block)

    def enter(self, sequence: Sequence, number: int, key: bytes) -> None:
        """Cache a full block of a sequence under a key."""
        self.pool.enter(key, sequence, number)

    @abc.abstractmethod
    def copy(self, source: int, target: int) -> None:
        """Copy K and V of a block to another, in all layers."""

    @abc.abstractmethod
    def clear(self, block: int, first: int) -> None:
        """Invalidate the rows of a block from row `first` on: its sequence was cut there."""
