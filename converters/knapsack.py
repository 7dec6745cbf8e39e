"""One option of each item, with the least cost in all within a number of bytes: a multiple-choice knapsack.

The linear relaxation is solved exactly on the lower convex hulls of the items' options (Sinha and Zoltners, Operations
Research 27, 1979): steps along the hulls are taken in the order of savings per byte, and the first that does not fit
is taken in part. Its cost bounds every choice from below. The choice itself takes the steps that fit, then
exchanges options of one item, or of two at a time, while that saves anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Options = Sequence[tuple[int, float]]
"""Bytes and cost of each option of an item."""
Ints = NDArray[np.int64]
Numbers = NDArray[np.float64]


class Choice(NamedTuple):
    """An option of each item."""

    options: tuple[int, ...]
    """Number of the option, by item."""
    nbytes: int
    cost: float
    bound: float
    """No choice costs less."""

    @property
    def gap(self) -> float:
        """Share by which a choice could cost less, at most."""
        return max(0.0, 1 - self.bound / self.cost) if self.cost > 0 else 0.0


def choose(items: Sequence[Options], limit: int) -> Choice:
    """Choose an option of each item, with the least cost within `limit` bytes.

    Parameters
    ----------
    items : sequence of sequence of (int, float)
        Bytes and cost of the options of each item; one option at least.
    limit : int
        Bytes of all items together, no less than those of their smallest options.
    """
    hulls = [_hull(options) for options in items]
    chosen = [hull[0] for hull in hulls]
    left = limit - sum(items[i][option][0] for i, option in enumerate(chosen))
    if left < 0:
        raise ValueError(f"The smallest options take {-left} bytes more than the limit of {limit}.")
    cost = sum(items[i][option][1] for i, option in enumerate(chosen))
    bound, broken = cost, False
    waiting = set[int]()
    for slope, item, option in sorted(_steps(items, hulls)):
        more = items[item][option][0] - items[item][chosen[item]][0]
        if not broken:
            fits = min(1.0, left / more)
            bound, broken = bound + slope * more * fits, fits < 1
        if item not in waiting and more <= left:
            chosen[item], left = option, left - more
        else:
            waiting.add(item)  # later steps along its hull stay out, too
    chosen = _exchanged(items, chosen, left)
    taken = [items[i][option] for i, option in enumerate(chosen)]
    return Choice(tuple(chosen), sum(nbytes for nbytes, _ in taken), sum(each for _, each in taken), bound)


def _hull(options: Options) -> list[int]:
    """Return the options on the lower convex hull, by bytes; each costs less than the one before."""
    order = sorted(range(len(options)), key=lambda i: (options[i][0], options[i][1]))
    hull: list[int] = []
    for i in order:
        if hull and options[i][1] >= options[hull[-1]][1]:
            continue
        while len(hull) > 1 and _slope(options, hull[-1], i) <= _slope(options, hull[-2], hull[-1]):
            hull.pop()
        hull.append(i)
    return hull


def _slope(options: Options, a: int, b: int) -> float:
    """Cost of a byte from one option to another; negative where it saves."""
    return (options[b][1] - options[a][1]) / max(options[b][0] - options[a][0], 1e-9)


def _steps(items: Sequence[Options], hulls: Sequence[list[int]]) -> list[tuple[float, int, int]]:
    """Return slope, item and option of each step along a hull."""
    return [(_slope(items[i], a, b), i, b) for i, hull in enumerate(hulls) for a, b in pairwise(hull)]


def _exchanged(items: Sequence[Options], chosen: list[int], left: int) -> list[int]:
    """Return a choice with other options of one item, or of two, as long as that costs less and `left` bytes do."""
    own = np.repeat(np.arange(len(items)), [len(options) for options in items])
    number = np.concatenate([np.arange(len(options)) for options in items])
    nbytes: Ints = np.array([nbytes for options in items for nbytes, _ in options])
    costs: Numbers = np.array([cost for options in items for _, cost in options])
    first = np.concatenate([[0], np.cumsum([len(options) for options in items])])[:-1]
    at = first + np.array(chosen)
    for _ in range(len(own)):
        more, saves = nbytes - nbytes[at][own], costs[at][own] - costs
        least = 1e-9 * float(costs[at].sum())
        up, down = np.flatnonzero(saves > least), np.flatnonzero(more < 0)
        alone = up[more[up] <= left]
        gain, moves = (float(saves[alone].max()), [int(alone[saves[alone].argmax()])]) if len(alone) else (0.0, [])
        pairs = np.where((more[up][:, None] + more[down] <= left) & (own[up][:, None] != own[down]),
                         saves[up][:, None] + saves[down], 0.0)
        if pairs.size and float(pairs.max()) > max(gain, least):
            i, j = np.unravel_index(int(pairs.argmax()), pairs.shape)
            moves = [int(up[i]), int(down[j])]
        if not moves:
            break
        left -= int(more[moves].sum())
        at[own[moves]] = moves
    return [int(number[i]) for i in at]
