"""Blocks of layers with a window: those that it sees, in a pool of their own, beside a sequence's other blocks."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Protocol

from edgeinfer.kernels import abi
from edgeinfer.memory_planner import Windowed

from ..errors import RequestError
from .prefix_cache import PrefixCache
from .sequences import GONE, Sequence, WindowTable


class BlockMemory(Protocol):
    """K and V of the blocks of a pool, in all layers that have it."""

    def take(self, block: int) -> None:
        """Make sure that a block that is used from now on holds nothing that does harm."""

    def copy(self, source: int, target: int) -> None:
        """Copy a block to another."""

    def clear(self, block: int, first: int) -> None:
        """Invalidate the rows of a block from row `first` on: its sequence was cut there."""


class WindowBlocks:
    """Ownership of the blocks of layers with a window (`Sequence.recent`).

    A sequence keeps as many blocks as its limit (`Windowed.sequence_blocks`), so that it can be truncated by the tokens
    of a pass and more. When the pool is empty, all sequences free the blocks that they do not need: they then keep
    only `MARGIN_TOKENS` for truncation. The pool is a prefix cache, too, with the keys of the sequences' other blocks;
    each of the two evicts by itself.

    Parameters
    ----------
    windowed : Windowed
    memory : BlockMemory
    living : of Sequence
        All open sequences.
    """

    def __init__(self, windowed: Windowed, memory: BlockMemory, living: Iterable[Sequence]):
        self.windowed, self.pool = windowed, PrefixCache(windowed.blocks, abi.BLOCK_TOKENS)
        self._memory, self._living, self._block_tokens = memory, living, self.pool.block_tokens

    # As in block_tables.py a block can be lost where Ctrl-C comes, but never be free while a table names it. `gone` is
    # raised before blocks go: a sequence may understate its rows, never overstate them.

    def extend(self, sequence: Sequence, n_tokens: int, cut: bool) -> None:
        """Make room for n more tokens, and free blocks that leave the window.

        Raises `RequestError` for more than a forward pass has, and if all blocks are held.
        """
        if n_tokens > self.windowed.pass_tokens:
            raise RequestError(f"{n_tokens} tokens at once are more than the {self.windowed.pass_tokens} that layers "
                               "with a "
                               "window have room for; run them in chunks, or open the model with a larger "
                               "prefill_chunk.")
        recent, used = _of(sequence), len(sequence.tokens)
        end = -(-(used + n_tokens) // self._block_tokens)
        self._give_back(recent, end - self.windowed.sequence_blocks)
        if rows := used % self._block_tokens:
            self.own(sequence, len(recent.blocks) - 1)
            if cut:
                self._memory.clear(recent.blocks[-1], rows)
        for _ in range(len(recent.blocks), end):
            recent.blocks.append(self.take())

    def place(self, sequence: Sequence, first: int, end: int) -> None:
        """Give an empty sequence the blocks `first` to end - 1, as if those before had been freed."""
        recent = _of(sequence)
        recent.gone = first
        recent.blocks += [GONE] * first
        for _ in range(first, end):
            recent.blocks.append(self.take())

    def fits(self, wanted: Items[tuple[Sequence, int]]) -> bool:
        """Return whether `extend` finds blocks for this many more tokens of each of several sequences.

        More tokens than a forward pass has come in several, which leave a sequence the rows that it must keep.
        """
        if (needed := self._needed(wanted)) > self.pool.n_available:
            self._shrink()
            needed = self._needed(wanted)
        return needed <= self.pool.n_available

    def _needed(self, wanted: Items[tuple[Sequence, int]]) -> int:
        """Return how many blocks are taken for more tokens of sequences, less those that each frees before."""
        size, most = self._block_tokens, self.windowed.pass_tokens
        needed = -(-most // size) if any(n > most for _, n in wanted) else 0  # of the passes, whichever it is
        for sequence, n in wanted:
            recent, used = _of(sequence), len(sequence)
            blocks, end, first = recent.blocks, -(-(used + n) // size), recent.gone
            if n > most:
                first = max(first, self.windowed.first_needed(used + n) // size)
            else:
                first = max(first, end - self.windowed.sequence_blocks)
            taken = end - max(first, len(blocks)) + (used % size > 0 and self.pool.is_shared(blocks[used // size]))
            needed += max(0, taken - sum(map(self.pool.is_own, blocks[recent.gone : first])))
        return needed

    def own(self, sequence: Sequence, number: int) -> None:
        """Copy a block of the sequence that others share."""
        recent = _of(sequence)
        shared = recent.blocks[number]
        if self.pool.is_shared(shared):
            copy = self.take()
            self._memory.copy(shared, copy)
            recent.listed = min(recent.listed, number)
            recent.blocks[number] = copy
            self.pool.drop(shared)

    def share(self, sequence: Sequence, copy: Sequence) -> None:
        """Let a fork hold the same blocks."""
        recent, other = _of(sequence), _of(copy)
        for block in recent.blocks:
            if block != GONE:
                self.pool.share(block)
        other.gone, other.blocks = recent.gone, list(recent.blocks)

    def trim(self, sequence: Sequence) -> None:
        """Free blocks after the last token or reserved place."""
        recent = _of(sequence)
        keep = -(-(len(sequence.tokens) + sequence.reserved) // self._block_tokens)
        if keep < len(recent.blocks):
            recent.listed = min(recent.listed, keep)
            past = recent.blocks[keep:]
            del recent.blocks[keep:]
            self._drop(past)
        if not recent.blocks:
            recent.gone = 0

    def usable(self, keys: Items[bytes]) -> int:
        """Return how many of the first blocks of a text a sequence can continue from: all that it sees then is
        cached."""
        most = run = 0
        for n, key in enumerate(keys, 1):
            run = 0 if self.pool.find(key) is None else run + 1
            if run >= n - self._first_seen(n * self._block_tokens):
                most = n
        return most

    def share_cached(self, sequence: Sequence, keys: Items[bytes]) -> None:
        """Give an empty sequence the cached blocks that are seen after all of these, as if it had freed others.
        """
        recent, first = _of(sequence), self._first_seen(len(keys) * self._block_tokens)
        recent.gone = first
        recent.blocks += [GONE] * first
        for key in keys[first:]:
            block = self.pool.find(key)
            assert block is not None
            self.pool.share(block)
            recent.blocks.append(block)

    def enter(self, sequence: Sequence, number: int, key: bytes) -> None:
        """Cache a full block of a sequence under a key, if it is still there."""
        if number >= _of(sequence).gone:
            self.pool.enter(key, _of(sequence), number)

    def _first_seen(self, n_tokens: int) -> int:
        """Return the first block that a token after n others sees."""
        return max(0, n_tokens - self.windowed.window + 1) // self._block_tokens

    def can_truncate(self, sequence: Sequence, n_tokens: int) -> int:
        """Return n where the sequence can be cut to n tokens, else 0."""
        return n_tokens if n_tokens == len(sequence) or _of(sequence).gone <= self._first_seen(n_tokens) else 0

    def check(self, sequence: Sequence, n_tokens: int) -> None:
        """Raise `RequestError` if a sequence cannot be cut to n tokens."""
        if 0 < n_tokens < len(sequence) and not self.can_truncate(sequence, n_tokens):
            lowest = _of(sequence).gone * self._block_tokens + self.windowed.window - 1
            raise RequestError(
                f"A sequence of {len(sequence)} tokens cannot be cut to {n_tokens}: layers with a window of "
                f"{self.windowed.window} have freed rows that a token there would see. Cut it to {lowest} tokens at "
                "least, or run its beginning again (rollback).")

    def _give_back(self, recent: WindowTable, first: int) -> None:
        """Free the blocks before block `first`."""
        begin, first = recent.gone, min(first, len(recent.blocks))
        if first <= begin:
            return
        recent.gone = first
        for number in range(begin, first):
            block, recent.blocks[number] = recent.blocks[number], GONE
            self._drop((block,))

    def _drop(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block != GONE:
                self.pool.drop(block)

    def take(self) -> int:
        """A block of one's own; if none is free or evicted, blocks that others do not need, then those that no living
        sequence names."""
        if not self.pool.n_available:
            self._shrink()
        if not self.pool.n_available:
            self.pool.recount(self._named(_of(sequence)) for sequence in self._living)
        block = self.pool.take()
        self._memory.take(block)
        return block

    @staticmethod
    def _named(recent: WindowTable) -> list[int]:
        """Blocks that a sequence holds, except those that an interruption kept from being freed."""
        recent.blocks[: recent.gone] = [GONE] * min(recent.gone, len(recent.blocks))
        return [block for block in recent.blocks if block != GONE]

    def _shrink(self) -> None:
        """Free all blocks that sequences do not need."""
        for sequence in self._living:
            first = self.windowed.first_needed(len(sequence.tokens))
            self._give_back(_of(sequence), first // self._block_tokens)


def _of(sequence: Sequence) -> WindowTable:
    assert sequence.recent is not None
    return sequence.recent
