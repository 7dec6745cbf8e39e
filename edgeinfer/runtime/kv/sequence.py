"""Sequences over the KV pool: block tables, copy-on-write, truncation."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING

import numpy as np

from edgeinfer.base.validation import shown
from edgeinfer.errors import RequestError
from edgeinfer.graph import KvAccess
from edgeinfer.kernels import abi
from edgeinfer.memory_planner import MemoryPlan
from edgeinfer.registry import each
from edgeinfer.runner import Sequence, WindowTable
from edgeinfer.runner.block_tables import BlockTables
from edgeinfer.runner.prefix_cache import prefix_keys, root_key, tail_key
from edgeinfer.runner.state_slots import StateSlots, StateTable
from edgeinfer.runner.window_blocks import WindowBlocks

from .block_memory import PoolMemory
from .planes import planes_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


class KVCache(BlockTables):
    """The KV region and the ownership of its blocks.

    Parameters
    ----------
    plan : MemoryPlan
    region : uint8 array
        Memory of the region ``kv``.
    stores : of KvAccess
        K and V of each layer of `plan.kv_layers`, in that order.
    state : uint8 array, optional
        Memory of the region ``state``.
    """

    def __init__(self, plan: MemoryPlan, region: NDArray[np.uint8], stores: Iterable[KvAccess],
                 state: NDArray[np.uint8] | None = None):
        super().__init__(plan.kv_blocks, abi.BLOCK_TOKENS)
        self.plan = plan
        of = {access.layer: access for access in stores}
        self.planes = planes_of(plan, region, [of[layer] for layer in plan.kv_layers])
        windowed, stored = plan.windowed, plan.pruned
        self.pruned_mask = region[stored.offset :][: stored.nbytes].reshape(-1, plan.kv_blocks, abi.BLOCK_TOKENS) \
            if stored else np.zeros((0, plan.kv_blocks, abi.BLOCK_TOKENS), np.uint8)
        """Flags of the tokens that each stage but the first lacks: (stages, blocks, rows of a block)."""
        self.window_layers = frozenset(windowed.layers if windowed else ())
        whole = [each for each in self.planes if self.window_layers.isdisjoint(each.layers)]
        others = [each for each in self.planes if not self.window_layers.isdisjoint(each.layers)]
        self._memory = PoolMemory(whole, plan.kv_blocks, self.pruned_mask[:, None])
        self._window_memory = PoolMemory(others, windowed.blocks if windowed else 0)
        self.recent = WindowBlocks(windowed, self._window_memory, self._living) if windowed else None
        """Ownership of the blocks of layers with a window, if these have a pool of their own."""
        self.state_memory = np.zeros((0, 0), np.uint8)
        """Slots of recurrent state: (slots, bytes)."""
        self.states: StateSlots | None = None
        """Ownership of the slots of recurrent layers, if there are any."""
        if plan.state and state is not None:
            n, nbytes = plan.state.slots, plan.state.slot_bytes
            self.state_memory = state[: n * nbytes].reshape(n, nbytes)
            self.states = StateSlots(n, nbytes, self._copy_slot, self._living)

    def new(self) -> Sequence:
        """Return an empty sequence, with tables that kernels read."""
        sequence, n = super().new(), -(-self.plan.request.ctx // abi.BLOCK_TOKENS)
        sequence.table = np.zeros(n, np.int32)
        sequence.address = sequence.table.ctypes.data
        if self.recent:
            table = np.zeros(n, np.int32)
            sequence.recent = WindowTable(table=table, address=table.ctypes.data)
        if self.states:
            sequence.state = StateTable()
        return sequence

    def take(self) -> int:
        """A block of one's own, which holds nothing that does harm."""
        block = super().take()
        self._memory.take(block)
        return block

    def copy(self, source: int, target: int) -> None:
        """Copy K and V of a block to another, in all layers that keep all."""
        self._memory.copy(source, target)

    def clear(self, block: int, first: int) -> None:
        """Zero the rows of a block from `first` on."""
        self._memory.clear(block, first)

    def extend(self, sequence: Sequence, n_tokens: int) -> None:
        """Make room for n more tokens, in all layers."""
        cut = sequence.cut
        super().extend(sequence, n_tokens)
        if self.recent:
            self.recent.extend(sequence, n_tokens, cut)

    def fits(self, wanted: Items[tuple[Sequence, int]]) -> bool:
        """Return whether `extend` finds blocks for this many more tokens of each of several sequences."""
        return super().fits(wanted) and all(part.fits(wanted) for part in (self.recent, self.states) if part)

    def fork(self, sequence: Sequence) -> Sequence:
        """Return a sequence with the same tokens that shares all blocks until one of the two writes."""
        copy = super().fork(sequence)
        if self.recent:
            self.recent.share(sequence, copy)
        if self.states:
            self.states.fork(sequence, copy)
        return copy

    def trim(self, sequence: Sequence) -> None:
        """Free blocks after the last token or reserved place."""
        super().trim(sequence)
        if self.recent:
            self.recent.trim(sequence)
        if self.states and not sequence.tokens:
            self.states.truncate(sequence, 0)

    def truncate(self, sequence: Sequence, n_tokens: int) -> None:
        """Drop all tokens but the first n, if the rows that these attend to are still there."""
        self.check_own(sequence)
        if self.recent:
            self.recent.check(sequence, n_tokens)
        if self.states and sequence.reserved:  # tokens that ran through a part of the layers are cancelled
            self.states.settle(sequence)
        if not self.states or not 0 <= n_tokens <= len(sequence):
            return super().truncate(sequence, n_tokens)
        self.states.check(sequence, n_tokens)
        try:
            self.states.truncate(sequence, n_tokens)
            super().truncate(sequence, n_tokens)
        except BaseException:  # Ctrl-C: a state is never that of other tokens
            self.states.truncate(sequence, n_tokens)
            super().truncate(sequence, n_tokens)
            raise

    def can_truncate(self, sequence: Sequence, n_tokens: int) -> int:
        """Return how many of the first n tokens can be kept; see `Runner.can_truncate`."""
        if self.states:
            n_tokens = self.states.can_truncate(sequence, n_tokens)
        return self.recent.can_truncate(sequence, n_tokens) if self.recent else n_tokens

    def _copy_slot(self, source: int, target: int) -> None:
        self.state_memory[target] = self.state_memory[source]

    def accept(self, sequence: Sequence, n_before: int, path: Items[int]) -> None:
        """Keep the tokens of a path after the first n, and move their rows together; see `Runner.accept`."""
        self.check_own(sequence)
        n = len(sequence.tokens) - n_before
        if n_before < 0 or n < 0 or any(not low < high < n for low, high in pairwise((-1, *path))):
            raise RequestError(f"Tokens {shown(path)} after the first {n_before} of {len(sequence.tokens)} cannot be "
                               "kept; count a path from 0, each token after the one before.")
        still = next((i for i, node in enumerate(path) if node != i), len(path))
        start = n_before + still
        if still == len(path):
            return self.truncate(sequence, start)
        if self.recent:
            self.recent.check(sequence, start)
        source = n_before + np.array(path[still:], np.int64)
        target = start + np.arange(len(source))
        for number in sorted(set((target // abi.BLOCK_TOKENS).tolist())):
            self.own(sequence, number)
            if self.recent:
                self.recent.own(sequence, number)
        tokens = [sequence.tokens[row] for row in source.tolist()]
        if sequence.decoded is not None and sequence.decoded > start:
            sequence.decoded = start + int(np.searchsorted(source, sequence.decoded))
        sequence.cut = True
        del sequence.tokens[start:]  # an interruption leaves a sequence that ends before the moved rows
        self._memory.move(np.array(sequence.blocks), source, target)
        if sequence.recent:
            self._window_memory.move(np.array(sequence.recent.blocks), source, target)
        sequence.tokens += tokens
        return self.truncate(sequence, len(sequence.tokens))

    # -- cached beginnings -------------------------------------------------------------------------------------------

    def usable(self, keys: Items[bytes]) -> int:
        """Return how many of the first cached blocks of a text a sequence can continue from, in all layers."""
        return self.recent.usable(keys) if self.recent else len(keys)

    def share_cached(self, sequence: Sequence, keys: Items[bytes]) -> None:
        """Give an empty sequence the blocks that are cached under keys."""
        super().share_cached(sequence, keys)
        if self.recent:
            self.recent.share_cached(sequence, keys)

    def enter(self, sequence: Sequence, number: int, key: bytes) -> None:
        """Cache a full block of a sequence under a key, in all layers that still have it."""
        super().enter(sequence, number, key)
        if self.recent:
            self.recent.enter(sequence, number, key)
        if self.states:
            self.states.enter(sequence, (number + 1) * abi.BLOCK_TOKENS, key)

    def from_prefix(self, ids: Items[int], origin: bytes) -> Sequence:
        """Return a sequence with the longest cached beginning of a text, without its last token.

        Recurrent layers continue from checkpoints alone, which may be in the middle of a block.
        """
        if not self.states:
            return super().from_prefix(ids, origin)
        keys = list(takewhile(lambda key: self.pool.find(key) is not None, prefix_keys(
            origin, ids, (len(ids) - 1) // self.block_tokens, self.block_tokens)))
        sequence, root = self.new(), root_key(origin)
        n_tokens, last = self.states.longest(root, keys, ids, self.pool)
        if not n_tokens:
            return sequence
        n, tail = divmod(n_tokens, self.block_tokens)
        self.share_cached(sequence, [*keys[:n], last] if tail else keys[:n])
        self.states.share_cached(sequence, last)
        sequence.tokens, sequence.cut = list(ids[:n_tokens]), True
        return sequence

    def cache_prefix(self, sequence: Sequence, n_tokens: int, origin: bytes) -> None:
        """Cache the full blocks of the first n tokens, and where the state stands, tokens after them too."""
        super().cache_prefix(sequence, n_tokens, origin)
        n, tail = divmod(len(sequence), self.block_tokens)
        if self.states and tail and n_tokens == len(sequence) and sequence.state.base > n * self.block_tokens:
            *_, parent = (root_key(origin), *prefix_keys(origin, sequence.tokens, n, self.block_tokens))
            key = tail_key(parent, sequence.tokens[n * self.block_tokens :])
            if self.states.enter(sequence, n_tokens, key, parent):
                self.pool.enter(key, sequence, n)
                sequence.cut = True  # a block that was cached before may have rows of rejected drafts after its tokens

    def drop_prefixes(self) -> None:
        """Empty the cache."""
        super().drop_prefixes()
        if self.recent:
            self.recent.pool.clear()
        if self.states:
            self.states.clear()

    def close(self) -> None:
        """Free the memory."""
        self.planes, self.pruned_mask, self.state_memory = [], self.pruned_mask[:0], self.state_memory[:0]
        for memory in (self._memory, self._window_memory):
            memory.close()

    # -- tokens that went through a part of the layers ---------------------------------------------------------------

    def lacking(self, sequence: Sequence, n_tokens: int) -> NDArray[np.bool_]:
        """Return flags of which of the first n tokens each stage but the first lacks: (stages, n)."""
        flags = self.pruned_mask[:, sequence.blocks].reshape(len(self.pruned_mask), abi.BLOCK_TOKENS
                                                              * len(sequence.blocks))
        return flags[:, :n_tokens] != 0

    def leave_out(self, sequence: Sequence, stage: int, rows: NDArray[np.int64]) -> None:
        """Record that a stage and those after it lack rows of a sequence, whose blocks are its own."""
        blocks = np.array(sequence.blocks)[rows // abi.BLOCK_TOKENS]
        self.pruned_mask[stage - 1 :, blocks, rows % abi.BLOCK_TOKENS] = 1

    def keys(self, sequence: Sequence, layer: int, head: int) -> NDArray[np.float32]:
        """K of a head in all rows of the sequence's blocks: (rows, head_dim)."""
        planes = next(planes for planes in self.planes if layer in planes.layers)
        return planes.keys(layer, head, sequence.blocks)

    def make_room(self, sequence: Sequence, n_tokens: int, gone: int) -> None:
        """Give an empty sequence the blocks for n tokens, and of layers with a window those after the first `gone`, as
        far as a sequence may hold them."""
        super().extend(sequence, n_tokens)
        if self.recent:
            n_blocks = -(-n_tokens // abi.BLOCK_TOKENS)
            self.recent.place(sequence, max(gone, n_blocks - self.recent.windowed.sequence_blocks), n_blocks)

    @property
    def pruning(self) -> dict[str, str]:
        """Settings of the technique that prunes prompts, by its name; empty if none does."""
        return {one.name: str(settings) for one, settings in each(self.plan.request.techniques)
                if one.boundaries(settings)}
