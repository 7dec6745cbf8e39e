"""The KV pools: bytes and offsets of each layer's K and V, and the division of a pool of a given size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from edgeinfer.base.units import round_up
from edgeinfer.graph import KvAccess
from edgeinfer.kernels import abi

from .lifetimes import Placement
from .plan import USUAL_TOKENS, Region, Request
from .reasons import held_words, pools
from .windows import Windowed

ALIGNED = 64
"""Bytes by which a region may begin before its contents."""
Layers = dict[int, Placement]
"""Allocation of the K and V of each layer that stores any."""


def place_kv(accesses: Iterable[KvAccess], request: Request, prunes: bool) -> tuple[Windowed | None, Layers, int]:
    """Lay out K and V: layers that keep everything, then those with a window; gives also where they end.

    Parameters
    ----------
    accesses : of KvAccess
        Of all operations.
    request : Request
    prunes : bool
        True if prompt tokens may be pruned between layers; then all layers keep everything.
    """
    accesses = list(accesses)
    windowed = None if prunes else Windowed.of(accesses, request)
    own_pool = frozenset(windowed.layers if windowed else ())
    stores = [access for access in accesses if access.stores]
    layers, end = _place([each for each in stores if each.layer not in own_pool], request.kv, request.kv_blocks)
    if windowed:
        recent = [each for each in stores if each.layer in own_pool]
        others, end = _place(recent, request.kv, windowed.blocks, end)
        layers |= others
    return windowed, layers, end


def _place(stores: Iterable[KvAccess], kv: str, blocks: int, end: int = 0) -> tuple[Layers, int]:
    """Lay out the layers of one pool from byte `end` on; gives their allocations and where they end.

    Of a plane a block of a head has a multiple of 64 bytes, so all planes begin with a line.
    """
    layers = {}
    for access in stores:
        stride = access.position_bytes(kv) * abi.BLOCK_TOKENS
        layers[access.layer] = Placement("kv", end, blocks * stride, stride)
        end += round_up(blocks * stride, 64)
    return layers, end


def kv_region(request: Request, layers: Mapping[int, Placement], nbytes: int, windowed: Windowed | None,
               pruned: Placement | None) -> Region:
    """Return the region of K and V, of this many bytes without pruned rows."""
    held = held_words(request)
    strides = [layer.stride for layer in layers.values()]
    return Region("kv", nbytes + (pruned.nbytes if pruned else 0) + ALIGNED,
                  f"{request.kv}{pools(request.kv_blocks, held, strides, windowed)}"
                  + (f"; {pruned.nbytes} bytes say which prompt tokens later layers lack" if pruned else ""))


def largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number from 1 to `most` that fits, where all smaller ones do; 0 if none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def pool_sizes(fits: Callable[[int, int], bool], request: Request, most: int,
               block_tokens: int = abi.BLOCK_TOKENS) -> tuple[int, int]:
    """Return how many blocks a pool has at most, and of how many sequences it keeps windows; 1 and 1 if nothing fits.

    One sequence with a whole context comes first, if it fits. Then as many sequences get windows as can have
    `USUAL_TOKENS` each, and the rest becomes blocks, so that longer sequences fit too.

    Parameters
    ----------
    fits : callable
        Says whether this many blocks with this many windows fit; fewer of either fit as well.
    request : Request
    most : int
        Blocks that the pool may have.
    block_tokens : int
        Tokens of a block.
    """
    context, usual = (-(-tokens // block_tokens) for tokens in (request.ctx, min(request.ctx, USUAL_TOKENS)))
    first = context if fits(context, 1) else 0
    windows = max(1, largest(lambda n: fits(max(first, n * usual), n), request.sequences))
    return max(1, largest(lambda blocks: fits(blocks, windows), most)), windows
