"""Memory of the blocks of one pool: K and V of the layers that have it, and flags of rows that some layers lack."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from edgeinfer.kernels import abi

from .planes import Planes

if TYPE_CHECKING:
    from numpy.typing import NDArray


class PoolMemory:
    """The memory of a pool's blocks, copied, moved and cleared in all layers at once.

    Parameters
    ----------
    planes : of Planes
    n_blocks : int
        Of the pool.
    flags : uint8 array of shape (stages, 1, blocks, BLOCK_TOKENS), optional
        Tokens that stages of a pruned prompt lack.
    """

    def __init__(self, planes: Iterable[Planes], n_blocks: int, flags: NDArray[np.uint8] | None = None):
        planes = list(planes)
        self._by_block: list[NDArray[np.uint8]] = [array for each in planes for array in each.arrays]
        """All that belongs to a block: each (layers or stages, KV heads or 1, blocks, bytes)."""
        self._by_row: list[NDArray[Any]] = [part for each in planes for part in each.by_row()]
        if flags is not None:
            self._by_block.append(flags)
            self._by_row.append(flags.reshape(*flags.shape[:3], abi.BLOCK_TOKENS // 4, 4))
        self._written = bytearray(n_blocks)

    def take(self, block: int) -> None:
        """Make sure that a block holds nothing that overflowed: a weight of 0 times NaN is NaN."""
        if self._written[block]:
            for plane in self._by_block:
                plane[:, :, block] = 0
        self._written[block] = 1

    def copy(self, source: int, target: int) -> None:
        """Copy K and V of a block to another."""
        for plane in self._by_block:
            plane[:, :, target] = plane[:, :, source]

    def clear(self, block: int, first: int) -> None:
        """Zero the rows of a block from `first` on."""
        rows = np.arange(first, abi.BLOCK_TOKENS)
        for part in self._by_row:
            part[:, :, block, ..., rows // 4, rows % 4] = 0

    def move(self, blocks: NDArray[np.int64], source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Copy K and V of rows of a sequence, which has these blocks, to other rows."""
        (to, here), (since, there) = ((blocks[rows // abi.BLOCK_TOKENS], rows % abi.BLOCK_TOKENS)
                                      for rows in (target, source))
        for part in self._by_row:
            part[:, :, to, ..., here // 4, here % 4] = part[:, :, since, ..., there // 4, there % 4]

    def close(self) -> None:
        """Free the memory."""
        self._by_block, self._by_row = [], []
