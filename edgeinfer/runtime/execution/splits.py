"""The choice of the tokens of a forward pass whose attention is split along the context.

A thread that reads a whole context merges its splits in its caches. If splits are shared between threads, partial
results pass through memory, which costs up to a tenth of the time of attention. So tokens are split if threads would
wait for each other otherwise, or if several tokens of one sequence read its context together.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from itertools import accumulate

from edgeinfer.kernels import abi
from edgeinfer.runner import DECODE, Segment

SPLIT_ROWS = abi.BLOCK_TOKENS * abi.SPLIT_BLOCKS
"""Rows of a context from which on the attention of few tokens is split."""
TILES = 4
"""Reads of a context by a unit of several tokens: one for each of its tiles of rows."""
SHARE = 16
"""Threads may wait for 1 / SHARE of the whole work of attention."""


def tokens_to_split(ordered: Items[Segment], offset: int, threads: int, heads: int, kv_heads: int) -> int:
    """Return how many of the last tokens of a pass are split, all of whole segments.

    Decoded tokens that share a sequence are, as many as fit. Of single tokens of many sequences only the last are,
    whose short units are claimed last: enough to fill the time in which other threads still read a longer context.

    Parameters
    ----------
    ordered : segments in the order of their tokens in the table
    offset : rows between the end of a sequence and its first token
    threads : of the pass
    heads, kv_heads : of the model
    """
    ends = [len(segment.sequence.tokens) + offset + len(segment.ids) for segment in ordered]
    if max(ends) <= SPLIT_ROWS:  # most passes of small models, of whose time the rest would take a twentieth
        return 0
    few = sum([len(segment.ids) for segment in ordered]) <= abi.ATTENTION_TOKENS
    costs = [end if len(segment.ids) == 1 else TILES * end for segment, end in zip(ordered, ends, strict=True)]
    waits = [(threads - 1) * longest for longest in accumulate(costs, max)]
    found = split = deepest = filled = 0
    total = kv_heads * sum(costs)
    for segment, end, cost, wait in zip(*map(reversed, (ordered, ends, costs, waits)), strict=True):
        found += len(segment.ids)
        if found > abi.ATTENTION_TOKENS or not (few or segment.role == DECODE):
            break
        deepest = max(deepest, end)
        if (len(segment.ids) > 1 and segment.role == DECODE) or (filled < wait and total < SHARE * wait):
            split = found
        filled += kv_heads * cost
    return split if deepest > SPLIT_ROWS * _splits_from(split, threads, heads) else 0


def _splits_from(n: int, threads: int, heads: int) -> int:
    """Return the number of context splits from which attention of n tokens runs split by split, as more units of work.
    The last splits are short. Measured with 8 and 16 tokens of 135M and 1.1B on two threads: between a tenth and a
    fifth is lost below 512 rows, nothing from 1024 on (docs/explanation/attention.md).
    """
    units = n * heads // 32  # of forward passes that are not split
    return 1 if n <= 4 else 4 if units >= 4 * threads else 2
