"""Rows of a weight in stored order, assembled from its sources, block by block."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgeinfer.graph import Source, Weight

Rows = NDArray[Any]
T = TypeVar("T")
AHEAD = 2
"""Blocks for each thread that are made and not yet written."""
Read = Callable[[Source, int, int], Rows]
"""Rows a to b of a source."""


def assembled(weight: Weight, width: int, dtype: type, read: Read, block_items: int) -> Iterator[Rows]:
    """The stored rows (rows, width), in blocks whose rows are a multiple of 16 up to the last one.

    Parameters
    ----------
    weight : Weight
        A concatenation of its sources, or their tiles of 16 rows in turn, of all or of one or two after the other; or
        rows that become tiles.
    width : int
        Items of a row.
    dtype : type
        Of an item; rows of padding are zeros.
    read : callable
        Reads rows of a source.
    block_items : int
        Items of a block, about.
    """
    for start, stop in block_ranges(weight, width, block_items):
        yield block_of(weight, start, stop, width, dtype, read)


def block_ranges(weight: Weight, width: int, block_items: int) -> Iterator[tuple[int, int]]:
    """First and last row (not included) of each block."""
    step = 16 * _in_turn(weight)
    step *= max(1, block_items // (width * step))
    return ((start, min(start + step, weight.shape[0])) for start in range(0, weight.shape[0], step))


def block_of(weight: Weight, start: int, stop: int, width: int, dtype: type, read: Read) -> Rows:
    """Stored rows start to stop."""
    if len(weight.sources) == 1 and weight.combine == "concat":
        return read(weight.sources[0], start, stop)
    out: Rows = np.zeros((stop - start, width), dtype)
    if weight.combine == "folded16":  # a row of the source is a tile
        whole = read(weight.sources[0], start // 16, stop // 16)
        out.reshape(len(whole), 16 * width)[:, : whole.shape[1]] = whole
        return out
    if weight.combine == "concat":
        _concatenate(out, weight, start, read)
        return out
    n = _in_turn(weight)
    span = weight.shape[0] // len(weight.sources) * n  # rows of those that alternate
    for first in range(start // span * span, stop, span):
        a, b = max(start, first), min(stop, first + span)
        _interleave(out[a - start : b - start], weight.sources[first // span * n :][:n], a - first, read)
    return out


def _in_turn(weight: Weight) -> int:
    """Return the number of sources that alternate by tiles of 16 rows."""
    return {"interleave16": len(weight.sources), "stacked_pairs16": 2}.get(weight.combine, 1)


def _concatenate(out: Rows, weight: Weight, start: int, read: Read) -> None:
    first = 0
    for source in weight.sources:
        rows = source.shape[0]
        a, b = max(start, first), min(start + len(out), first + rows)
        if a < b:
            out[a - start : b - start] = read(source, a - first, b - first)
        first += rows


def _interleave(out: Rows, sources: Sequence[Source], start: int, read: Read) -> None:
    """A source that ends early is followed by zeros."""
    n = len(sources)
    a, b = start // n, (start + len(out)) // n
    tiles = out.reshape(-1, n, 16, out.shape[1])
    for i, source in enumerate(sources):
        end = min(b, source.shape[0])
        if a < end:
            rows = read(source, a, end)
            whole = (end - a) // 16
            tiles[:whole, i] = rows[: whole * 16].reshape(whole, 16, out.shape[1])
            if rest := rows[whole * 16 :].shape[0]:
                tiles[whole, i, :rest] = rows[whole * 16 :]


def in_order(made: Callable[[int, int], tuple[Rows, T]], ranges: Iterator[tuple[int, int]],
             on_block: Callable[[T], None]
             ) -> Iterator[Rows]:
    """Blocks in order, made by all cores; `on_block` gets the other results of a block, in order too, in the caller's
    thread.

    Parameters
    ----------
    made : callable
        Makes rows start to stop.
    ranges : iterator of (int, int)
        First and last row (not included) of each block.
    on_block : callable
        Gets the second part of each result.
    """
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    waiting: deque[Future[tuple[Rows, T]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        more = True
        while more or waiting:
            while more and len(waiting) < AHEAD * threads:
                bounds = next(ranges, None)
                if more := bounds is not None:
                    waiting.append(pool.submit(made, *bounds))
            if waiting:
                rows, done = waiting.popleft().result()
                on_block(done)
                yield rows
