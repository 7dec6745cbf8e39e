"""Reference of the weighted sums of those blocks of V of which some head needs a row, and of the mean for the rest."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ...abi import BLOCK_TOKENS, COUNT_TOKENS, INSTEAD_MEAN, SPLIT_BLOCKS, STRETCH_SPLITS
from ...parameters import ATTENTION
from ..expected import Expected
from ..tolerances import TINY, TOLERANCES
from ..view import InstructionView
from .attention import LOWEST, NEVER, mean_blocks, mean_of, partials, score_row, weigh
from .attention_paths import Seen, seen_tokens
from .attention_select import wanted_blocks


def values_reference(kv: str) -> Callable[[InstructionView], list[Expected]]:
    """The reference of ``attention_values_<kv>``."""

    def reference(view: InstructionView) -> list[Expected]:
        p, end = view.parameters(ATTENTION), view.count(COUNT_TOKENS)
        first, out = end - view.count(p.rows), []
        for seen, h in itertools.product(seen_tokens(view, kv, first, end), range(p.kv_heads)):
            out += _splits(view, seen, seen.t - first, h)
            if p.instead == INSTEAD_MEAN:
                out.append(_mean(view, seen, (seen.t - first) * p.kv_heads + h, h))
        return out

    return reference


def _splits(view: InstructionView, seen: Seen, t: int, h: int) -> list[Expected]:
    p, path, out = view.parameters(ATTENTION), seen.path, []
    group = p.heads // p.kv_heads
    rows = range(t * p.heads + h * group, t * p.heads + (h + 1) * group)
    blocks, scores = wanted_blocks(view, rows, path), [score_row(view, row)[0].astype(np.float64) for row in rows]
    positions = np.flatnonzero(np.repeat(blocks, BLOCK_TOKENS)[: path.position + 1])
    positions = positions[path.there[positions]]
    whole = any(float(score_row(view, row)[2][0]) <= NEVER for row in rows)
    for split in path.splits:
        mine = positions[_part_of(blocks, path.splits, split,
                                  whole)[positions // BLOCK_TOKENS] & (positions >= path.low)]
        if not mine.size:
            out += [Expected(f"row {row}, split {split}: m", partials(view, row, split)[0], np.array([LOWEST]))
                    for row in rows]
            continue
        _k, v, v_scales = seen.stored.of(h, path.rows[mine - path.low])
        part = weigh(np.array([row[mine] for row in scores]), np.full(group, TOLERANCES["sums"]), v, v_scales)
        sums = part.weights @ (mine[:, None] % BLOCK_TOKENS == np.arange(BLOCK_TOKENS))
        for g, row in enumerate(rows):
            m, total, acc, padding = partials(view, row, split)
            name = f"row {row}, split {split}: "
            out += [Expected(name + "m", m, part.largest[g : g + 1]),
                    Expected(name + "l", total, sums[g], False, part.relative[g] * sums[g] + TINY),
                    Expected(name + "acc", acc, part.total[g], False, part.slack[g]),
                    Expected(name + "padding", padding, np.zeros(len(padding)))]
    return out


def _part_of(blocks: NDArray[np.bool_], splits: range, split: int, whole: bool) -> NDArray[np.bool_]:
    """Return a mask of the blocks of a split's partial result.

    They are its own blocks if a head selects all; otherwise some of its stretch, distributed over its splits.
    """
    first = split - split % STRETCH_SPLITS
    part = split - max(first, splits.start)
    at = np.flatnonzero(blocks)
    at = at[at // SPLIT_BLOCKS == split] if whole else \
        at[at // SPLIT_BLOCKS // STRETCH_SPLITS == first // STRETCH_SPLITS][part * SPLIT_BLOCKS :][:SPLIT_BLOCKS]
    return np.isin(np.arange(len(blocks)), at)


def _mean(view: InstructionView, seen: Seen, row: int, h: int) -> Expected:
    """The mean over rows that are there; without any, that there is none."""
    found = [np.arange(b * BLOCK_TOKENS, (b + 1) * BLOCK_TOKENS) for b in mean_blocks(seen.path.position)]
    positions, where = np.concatenate([np.zeros(0, np.int64), *found]), mean_of(view, row)
    positions = positions[seen.path.there[positions]]
    if not len(positions):
        return Expected(f"mean of row {row}", where[-1:], np.zeros(1))
    _k, v, v_scales = seen.stored.of(h, positions)
    part = weigh(np.zeros((1, len(positions))), np.array([TOLERANCES["sums"]]), v, v_scales)
    mean, slack = (np.pad(x[0] / len(positions), (0, len(where) - v.shape[1])) for x in (part.total, part.slack))
    mean[-1] = len(positions)
    return Expected(f"mean of row {row}", where, mean, False, slack)
