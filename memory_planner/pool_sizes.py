"""The division of a KV pool of a given size: blocks for all sequences, and windows in layers that have one."""

from __future__ import annotations

from collections.abc import Callable

from edgeinfer.kernels import abi

from .plan import USUAL_TOKENS, Request


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
    `USUAL_TOKENS` each, and what is left becomes blocks, so that longer sequences fit too.

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
