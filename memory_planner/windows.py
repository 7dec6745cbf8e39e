"""Layers with sliding-window attention: the number of KV blocks they need, in a pool of their own.

All such layers share one pool and one block table per sequence, so the largest window decides: no known model has
windows of different sizes, and a table for each size would cost time in every pass. If keeping all positions takes no
more blocks, the layers keep them all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from edgeinfer.base.dataclass import dataclass
from edgeinfer.graph import KvAccess
from edgeinfer.kernels import abi

if TYPE_CHECKING:
    from .plan import Request

MARGIN_TOKENS = abi.MASK_TOKENS + abi.MAX_STEPS
"""Tokens by which a sequence can be cut at any time without running any again: more than a drafter draft tokens, one by
one or as a tree, before the text turns out to continue otherwise."""


@dataclass(frozen=True)
class Windowed:
    """Layers that keep the last rows of a sequence only, and the pool that has them."""

    layers: tuple[int, ...]
    window: int
    """Positions that a token sees, itself included; the largest of these layers."""
    pass_tokens: int
    """Most tokens that a sequence gets at once."""
    sequence_blocks: int
    """Blocks that a sequence holds at most, those of a forward pass included."""
    blocks: int
    """Blocks of the pool."""

    @classmethod
    def of(cls, accesses: Iterable[KvAccess], request: Request) -> Windowed | None:
        """Plan the windows, given the K and V of all operations; None if all layers keep everything.

        Not used if prompts are pruned: every layer's K and V of a whole prompt are there at once.
        """
        windows: dict[int, list[int]] = {}
        for access in accesses:
            if not access.stores:
                windows.setdefault(access.layer, []).append(access.window)
        windows = {layer: each for layer, each in windows.items() if all(each)}
        if not windows:
            return None
        window, pass_tokens = max(map(max, windows.values())), max(request.tokens, MARGIN_TOKENS)
        most = _blocks(window + pass_tokens + MARGIN_TOKENS) + 1
        alone = cls(tuple(windows), window, pass_tokens, most, request.windows * most)
        found = alone.needed(request.own_each, request.windows)
        return replace(alone, blocks=found) if found < request.kv_blocks else None

    @property
    def positions(self) -> int:
        """Positions that a sequence keeps at most."""
        return self.sequence_blocks * abi.BLOCK_TOKENS

    def needed(self, own: int, sequences: int) -> int:
        """Return how many blocks sequences need that share a prompt and get up to `own` tokens each.

        Rows that they may hold; or, all sharing one pass, those before it and of the pass; or the
        shared end of the prompt and each one's additions.
        """
        before = _blocks(self.window + MARGIN_TOKENS) + 2
        added = -(-(abi.BLOCK_TOKENS - 1 + own) // abi.BLOCK_TOKENS)
        return min(sequences * self.sequence_blocks, sequences * before + _blocks(self.pass_tokens),
                   self.sequence_blocks + sequences * added)

    def sequences_of(self, tokens: int, chunk: int) -> int:
        """Return how many sequences of this many tokens each the pool holds: prompts that are read one after the other
        in chunks, and then a token of each in one pass."""
        def held(before: int, after: int) -> int:
            return _blocks(after) - self.first_needed(before) // abi.BLOCK_TOKENS

        prompt = tokens - 1
        reading = max((held(at, min(at + chunk, prompt)) for at in range(0, prompt, chunk)), default=0)
        together, waiting = self.blocks // held(prompt, tokens), held(prompt, prompt)
        return max(0, min(together, (self.blocks - reading) // waiting + 1 if waiting else together))

    def first_needed(self, n_tokens: int) -> int:
        """Return the first row that a token after this many sees, or one after fewer by the margin at most."""
        return max(0, n_tokens - self.window + 1 - MARGIN_TOKENS)


def _blocks(tokens: int) -> int:
    return -(-tokens // abi.BLOCK_TOKENS)
