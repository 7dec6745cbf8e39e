"""Slots of recurrent state: ownership, copy on write, checkpoints, and restoring after a cancelled pass.

A slot is a block of a pool: sequences share one until one of them runs on, and the prefix cache holds some as
checkpoints, under the keys of the KV blocks before them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import field

from edgeinfer.kernels import abi

from ..base.dataclass import dataclass
from ..errors import RequestError
from .prefix_cache import PrefixCache, tail_key
from .sequences import Sequence

NOTE = struct.Struct("<qq32s")
"""Note of a checkpoint in a file: tokens it can be cut to, tokens after its last full block, and their blocks' key."""
MAX_COPIED = 1 << 20
"""Bytes of a slot up to which a copy takes less time than Python does between two steps."""


@dataclass(eq=False)
class StateTable:
    """The slots of one sequence."""

    blocks: list[int] = field(default_factory=list)
    """The slot of its state; empty before its first token."""
    listed: int = 0
    base: int = 0
    """Least number of tokens that the slot's state can be cut to, but for 0."""
    before: list[tuple[int, int]] = field(default_factory=list)
    """During a pass that cannot be undone: a copy of the slot, with its `base`."""
    after: int = 0
    """Number of tokens after a pass that has ended: the length of the sequence once they are committed."""
    kept: dict[int, tuple[int, int]] = field(default_factory=dict)
    """The checkpoint by its number of tokens: slot and `base`."""

    @property
    def all(self) -> list[int]:
        """Return every slot that the sequence holds."""
        return [*self.blocks, *(slot for slot, _ in self.before), *(slot for slot, _ in self.kept.values())]


class StateSlots:
    """Ownership of the slots.

    Parameters
    ----------
    n_slots, slot_bytes : int
    copy : callable
        Copies a slot to another.
    living : of Sequence
        All open sequences.
    """

    def __init__(self, n_slots: int, slot_bytes: int, copy: Callable[[int, int], None], living: Iterable[Sequence]):
        self.pool, self._slot_bytes = PrefixCache(n_slots, abi.BLOCK_TOKENS), slot_bytes
        self._copy, self._living = copy, living
        self._bases: dict[int, int] = {}
        """Bases of cached slots, as `StateTable.base`."""
        self._tails: dict[int, tuple[bytes, int]] = {}
        """Slots that were cached in the middle of a block: the key of the blocks before, and the tokens after them.
        """

    # As in block_tables.py a slot can be lost where Ctrl-C comes, but never be free while a table names it.

    def begin(self, sequence: Sequence, n_tokens: int, steps: bool = False) -> None:
        """Give a sequence a slot of its own for a pass over n new tokens, and keep a copy if it cannot be undone.

        Raises `RequestError` if no slot is left.
        """
        table = _of(sequence)
        if table.before:  # of a pass whose end was interrupted
            self.settle(sequence)
        table.after = 0
        if not table.blocks:
            table.blocks.append(self._take())
        elif self.pool.is_shared(table.blocks[0]):
            shared, own = table.blocks[0], self._take()
            self._copy(shared, own)
            table.blocks[0] = own
            self.pool.drop(shared)
        if (steps or n_tokens > abi.JOURNAL_TOKENS) and len(sequence):
            copy = self._take()
            self._copy(table.blocks[0], copy)
            table.before.append((copy, table.base))

    def end(self, sequence: Sequence, n_tokens: int, steps: int = 0, offset: int = 0) -> None:
        """Note that a pass over n tokens and this many further steps of one has ended; `sequence` commits them next,
        after those `offset` tokens that are reserved and have gone through the same layers."""
        table, length = _of(sequence), len(sequence) + offset + n_tokens
        table.base = len(sequence) + offset + steps
        if n_tokens > abi.JOURNAL_TOKENS:
            table.base = length // abi.JOURNAL_TOKENS * abi.JOURNAL_TOKENS
        table.after = length + steps

    def settle(self, sequence: Sequence) -> None:
        """Restore the state before a pass if the sequence did not commit its tokens, or drop that state."""
        table = _of(sequence)
        if table.after != len(sequence) and table.before:
            changed, (table.blocks[0], table.base) = table.blocks[0], table.before[-1]
            table.before.pop()
            self.pool.drop(changed)
        elif table.after != len(sequence):  # some tiles may have replayed the journal
            table.base = len(sequence)
        while table.before:
            self.pool.drop(table.before.pop()[0])

    def steps(self, sequences: Items[Sequence]) -> bool:
        """Return whether a pass of several steps pays, which needs a copy of each slot."""
        return self._slot_bytes <= MAX_COPIED and self.fits([(one, abi.JOURNAL_TOKENS + 1) for one in sequences])

    def fork(self, sequence: Sequence, copy: Sequence) -> None:
        """Let a fork share the state."""
        mine, other = _of(sequence), _of(copy)
        for slot in mine.blocks:
            self.pool.share(slot)
        other.blocks, other.base = list(mine.blocks), mine.base

    def fits(self, wanted: Items[tuple[Sequence, int]]) -> bool:
        """Return whether `begin` finds slots for these sequences."""
        needed = longer = 0
        for sequence, n in wanted:
            table = _of(sequence)
            needed += not table.blocks or self.pool.is_shared(table.blocks[0])
            longer += n > abi.JOURNAL_TOKENS and len(sequence) > 0
        if needed + longer > self.pool.n_available:
            self._shrink()
        return needed + longer <= self.pool.n_available

    def checkpoint(self, sequence: Sequence) -> None:
        """Keep the present state instead of an earlier one, so that the sequence can be cut to this length; not if no
        slot is left for that."""
        table = _of(sequence)
        if not table.blocks or len(sequence) in table.kept:
            return
        while table.kept:
            self.pool.drop(table.kept.popitem()[1][0])
        if self.pool.n_available:
            self.pool.share(table.blocks[0])
            table.kept[len(sequence)] = (table.blocks[0], table.base)

    def can_truncate(self, sequence: Sequence, n_tokens: int) -> int:
        """Return the most of the first n tokens that a sequence can be cut to."""
        table = _of(sequence)
        if n_tokens == len(sequence) or n_tokens >= table.base:
            return n_tokens
        if any(base <= n_tokens <= length for length, (_, base) in table.kept.items()):
            return n_tokens
        return max((length for length in table.kept if length <= n_tokens), default=0)

    def check(self, sequence: Sequence, n_tokens: int) -> None:
        """Raise `RequestError` if a sequence cannot be cut to n tokens."""
        if (most := self.can_truncate(sequence, n_tokens)) < n_tokens:
            raise RequestError(f"A sequence of {len(sequence)} tokens cannot be cut to {n_tokens}: its recurrent state "
                               f"has continued. Cut it to {most}, or run its beginning again (rollback).")

    def truncate(self, sequence: Sequence, n_tokens: int) -> None:
        """Forget all tokens but the first n, to which the sequence can be cut; it still has the others."""
        table = _of(sequence)
        if n_tokens == 0:
            self._drop(table.blocks)
        elif n_tokens < table.base and n_tokens != len(sequence):
            found = next(length for length, (_, base) in sorted(table.kept.items()) if base <= n_tokens <= length)
            slot, base = table.kept[found]
            self.pool.share(slot)
            gone = table.blocks[0]
            table.blocks[0], table.base = slot, base
            self.pool.drop(gone)
        for length in [length for length in table.kept if length > n_tokens]:
            self.pool.drop(table.kept.pop(length)[0])
        if n_tokens == 0:
            table.base = 0

    def _drop(self, blocks: list[int]) -> None:
        while blocks:
            self.pool.drop(blocks.pop())

    # -- checkpoints of the prefix cache -----------------------------------------------------------------------------

    def longest(self, root: bytes, keys: Items[bytes], ids: Items[int], blocks: PrefixCache) -> tuple[int, bytes]:
        """Return from how many tokens of a text a sequence can continue, and under which key they are cached.

        Parameters
        ----------
        root : key of the empty text
        keys : of the text's first blocks, whose K and V are cached
        ids : the text
        blocks : those of K and V
        """
        tails: dict[bytes, list[int]] = {}
        for parent, tail in self._tails.values():
            tails.setdefault(parent, []).append(tail)
        for n in range(len(keys), -1, -1):
            parent, first = keys[n - 1] if n else root, n * abi.BLOCK_TOKENS
            for tail in sorted(tails.get(parent, ()), reverse=True):
                key = tail_key(parent, ids[first : first + tail])
                if first + tail < len(ids) and self.pool.find(key) is not None and blocks.find(key) is not None:
                    return first + tail, key
            if n and self.pool.find(parent) is not None:
                return first, parent
        return 0, root

    def share_cached(self, sequence: Sequence, key: bytes) -> None:
        """Give an empty sequence the checkpoint that is cached under a key."""
        slot, table = self.pool.find(key), _of(sequence)
        assert slot is not None
        self.pool.share(slot)
        table.blocks.append(slot)
        table.base = self._bases[slot]

    def enter(self, sequence: Sequence, n_tokens: int, key: bytes, parent: bytes = b"") -> bool:
        """Cache the state after n tokens under their key, if the sequence's can be cut to there.

        Tokens that do not fill a block come after blocks with the key `parent`.
        """
        table = _of(sequence)
        if not table.blocks or not table.base <= n_tokens <= len(sequence) or self.pool.find(key) is not None \
                or self.pool.is_cached(table.blocks[0]):
            return False
        self._bases[table.blocks[0]] = table.base
        self.pool.enter(key, table, 0)
        self._tails.pop(table.blocks[0], None)
        if tail := n_tokens % abi.BLOCK_TOKENS:
            self._tails[table.blocks[0]] = parent, tail
        return True

    def note(self, slot: int) -> bytes:
        """Return the note of a cached slot."""
        parent, tail = self._tails.get(slot, (b"", 0))
        return NOTE.pack(self._bases[slot], tail, parent)

    def noted(self, slot: int, note: bytes) -> bool:
        """Accept another process's note of a slot that is about to be cached; return whether it is plausible."""
        base, tail, parent = NOTE.unpack(note)
        if base < 0 or not 0 <= tail < abi.BLOCK_TOKENS:
            return False
        self._bases[slot] = base
        self._tails.pop(slot, None)
        if tail:
            self._tails[slot] = parent, tail
        return True

    def clear(self) -> None:
        """Drop all checkpoints of the cache."""
        self.pool.clear()
        self._tails.clear()

    def _take(self) -> int:
        """A slot of one's own; if none is free or evicted, sequences' checkpoints are dropped, then those that no
        living sequence names."""
        if not self.pool.n_available:
            self._shrink()
        if not self.pool.n_available:
            self.pool.recount(_of(sequence).all for sequence in self._living)
        if not self.pool.n_available:
            raise RequestError(f"All {self.pool.n_blocks} slots of recurrent state are in use; open the model with "
                               "more max_sequences or state_memory, or release a sequence.")
        return self.pool.take()

    def _shrink(self) -> None:
        """Give up the checkpoints of all sequences."""
        for sequence in self._living:
            kept = _of(sequence).kept
            while kept:
                self.pool.drop(kept.popitem()[1][0])


def _of(sequence: Sequence) -> StateTable:
    assert sequence.state is not None
    table: StateTable = sequence.state
    return table
