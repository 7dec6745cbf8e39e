"""The pool of KV blocks: page bookkeeping in plain Python, no array in it (PagedAttention, arXiv 2309.06180)."""

from __future__ import annotations

from collections.abc import Iterable

from edgeinfer.errors import RequestError
from edgeinfer.kernels import abi


def shared_blocks(prompt: int, own: int, sequences: int, block_tokens: int = abi.BLOCK_TOKENS) -> int:
    """Return how many blocks sequences need that share a prompt and get up to `own` tokens each.

    Full blocks of the prompt exist once; of the one that it ends in each has a copy. A sequence's last token is never
    written.
    """
    whole, rest = divmod(prompt, block_tokens)
    return whole + (sequences if own > 1 else 1) * -(-(rest + max(own - 1, 0)) // block_tokens)


class BlockPool:
    """Allocates block numbers and counts their holders.

    Parameters
    ----------
    n_blocks : int
        Blocks that the plan has room for.
    block_tokens : int
        Tokens of a block.
    """

    def __init__(self, n_blocks: int, block_tokens: int = abi.BLOCK_TOKENS):
        self.n_blocks, self.block_tokens = n_blocks, block_tokens
        self._free = list(range(n_blocks - 1, -1, -1))
        self._holders = [0] * n_blocks

    @property
    def n_free(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    def take(self) -> int:
        """A block of one's own.

        Raises
        ------
        RequestError
            If all blocks are held.
        """
        if not self._free:
            raise RequestError(f"All {self.n_blocks} KV blocks of {self.block_tokens} tokens are in use; open the "
                               "model with a larger ctx or kv_memory, more max_sequences or own_tokens, or release a "
                               "sequence.")
        block = self._free.pop()
        self._holders[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more holder of a block."""
        self._holders[block] += 1

    def is_shared(self, block: int) -> bool:
        """Return whether writing to the block would change it under another holder."""
        return self._holders[block] > 1

    def drop(self, block: int) -> None:
        """One holder less; the last one frees the block."""
        self._holders[block] -= 1
        if self._holders[block] == 0:
            self._free.append(block)

    def recount(self, tables: Iterable[list[int]]) -> None:
        """Count the holders again from all block tables there are: frees blocks that no table names.

        For sequences that were forgotten without being released, and after an interruption.
        """
        holders = [0] * self.n_blocks
        for table in tables:
            for block in table:
                holders[block] += 1
        self._free, self._holders = [block for block, held in enumerate(holders) if not held][::-1], holders
