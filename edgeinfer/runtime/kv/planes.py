"""Views of K, V and scales in the KV region, as arrays (for the layout see `abi.BLOCK_TOKENS`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from edgeinfer.graph import KvAccess
from edgeinfer.kernels import abi
from edgeinfer.memory_planner import MemoryPlan

from ...quant import KV_TYPES
from ...quant import kv as layouts

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ROWS = abi.BLOCK_TOKENS // 4, 4


class Planes(NamedTuple):
    """K, V and, of codes, scales of alike layers: bytes, each (layers, KV heads, blocks, bytes of a head in a block).

    If keys are latent there is no V.
    """

    layers: tuple[int, ...]
    head_dim: int
    kv: str
    arrays: tuple[NDArray[np.uint8], ...]
    latent: bool = False

    def by_row(self) -> Iterator[NDArray[Any]]:
        """Views that tell rows apart: (layers, KV heads, blocks, ..., rows of a block // 4, rows % 4)."""
        kind = KV_TYPES[self.kv]
        k, *others = self.arrays
        values, scales = ([], others) if self.latent else (others[:1], others[1:])
        word = f"<u{kind.piece}"
        yield k.view(word).reshape(*k.shape[:3], -1, *_ROWS)
        for v in values:
            if kind.alternating > 1:
                yield v.reshape(*v.shape[:3], _ROWS[0], -1, 4).swapaxes(3, 4)
            else:
                yield v.view(word).reshape(*v.shape[:3], *_ROWS, -1).transpose(0, 1, 2, 5, 3, 4)
        for plane in scales:
            yield plane.view(np.uint16).reshape(*plane.shape[:3], 2, *_ROWS)

    def keys(self, layer: int, head: int, blocks: list[int]) -> NDArray[np.float32]:
        """K of a head in all rows of some blocks: (rows, head_dim)."""
        k, *others = (plane[self.layers.index(layer), head][blocks] for plane in self.arrays)
        scales = others[0 if self.latent else 1 :]
        rows = layouts.unpack_keys(k, KV_TYPES[self.kv], abi.BLOCK_TOKENS)
        found = rows.astype(np.float32).reshape(len(k) * abi.BLOCK_TOKENS, -1)[:, : self.head_dim]
        for plane in scales:
            found *= plane.view(np.float16)[:, : abi.BLOCK_TOKENS].reshape(-1, 1)
        return found


def planes_of(plan: MemoryPlan, region: NDArray[np.uint8], stores: Iterable[KvAccess]) -> list[Planes]:
    """Return views of the KV region: one entry for layers that are alike and follow each other.

    Parameters
    ----------
    plan : MemoryPlan
    region : uint8 array
        Memory of the region ``kv``.
    stores : of KvAccess
        K and V of each layer of `plan.kv_layers`, in that order.
    """
    found, kv = [], plan.request.kv
    for (heads, head_dim, latent, blocks), alike in groupby(
            stores, lambda own: (own.heads, own.head_dim, own.latent, plan.kv_pool(own.layer))):
        layers = tuple(access.layer for access in alike)
        first, size = plan.kv_layers[layers[0]], abi.kv_block_bytes(kv, head_dim)
        apart = plan.kv_layers[layers[1]].offset - first.offset if len(layers) > 1 else first.nbytes
        arrays, start = [], first.offset
        codes = (size,) if latent else (size, size)
        for nbytes in (*codes, abi.kv_head_bytes(kv, head_dim, latent) - sum(codes)):
            if nbytes:
                shape = len(layers), heads, blocks, nbytes
                arrays.append(np.ndarray(shape, np.uint8, region, start, (apart, blocks * nbytes, nbytes, 1)))
            start += heads * blocks * nbytes
        found.append(Planes(layers, head_dim, kv, tuple(arrays), latent))
    return found
