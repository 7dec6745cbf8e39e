"""Reference of the choice of rows of V, and which rows and blocks a choice needs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...abi import BLOCK_TOKENS, COUNT_TOKENS
from ...parameters import ATTENTION
from ..expected import Expected
from ..tolerances import TINY, TOLERANCES
from ..view import InstructionView, float_of
from .attention import NEVER, score_row
from .attention_paths import Path, paths


def select_reference(view: InstructionView) -> list[Expected]:
    """The reference of ``attention_select``."""
    p, end, out = view.parameters(ATTENTION), view.count(COUNT_TOKENS), []
    first, seen = end - view.count(p.rows), paths(view, end, p.window)
    for row in range((end - first) * p.heads):
        path = seen[first + row // p.heads]
        all_scores, sums, choice, _largest = score_row(view, row)
        scores, name = all_scores[path.low : path.position + 1], f"row {row}: "
        m, total = sums[path.splits.start : path.splits.stop].astype(np.float64).T
        least, slack, position = _least(scores, p.most, np.float32(float_of(p.least)), path)
        whole = (np.exp(m - m.max()) * total).sum()
        out += [Expected(name + "score", choice[:1], np.array([least]), slack == 0, slack),
                Expected(name + "position", choice[1:2].view(np.int32), np.array([position])),
                Expected(name + "largest", choice[2:3], np.array([m.max()])),
                Expected(name + "sum", choice[3:], np.array([whole]), False, TOLERANCES["sums"] * whole + TINY)]
    return out


def _least(scores: NDArray[np.float32], most: int, depth: np.float32, path: Path) -> tuple[float, float, int]:
    """(score, how far another may be from it that chooses the same, position)."""
    if most == 0:
        return max(float(scores.max() + depth), NEVER), 0.0, path.position
    if most >= int(path.there.sum()):
        return NEVER, 0.0, path.position
    ordered = np.sort(scores)[::-1].astype(np.float64)
    score, lower = ordered[most - 1], ordered[most]
    if score > lower:  # any score between the two will do
        lower = float(np.nextafter(np.float32(lower), np.float32(np.inf)))
        return (score + lower) / 2, (score - lower) / 2 + TINY, path.position
    ties = np.flatnonzero(scores == np.float32(score))
    return score, 0.0, path.low + int(ties[most - int((scores > np.float32(score)).sum()) - 1])


def wanted(view: InstructionView, row: int, path: Path) -> NDArray[np.bool_]:
    """Return a mask of the positions of the whole context that a row selects."""
    scores, _sums, choice, _largest = score_row(view, row)
    at, out = np.arange(path.low, path.position + 1), np.zeros(path.position + 1, np.bool_)
    seen, position = scores[path.low : path.position + 1], int(choice[1:2].view(np.int32)[0])
    out[at] = (seen > choice[0]) | ((seen == choice[0]) & (at <= position))
    return out


def wanted_blocks(view: InstructionView, rows: range, path: Path) -> NDArray[np.bool_]:
    """Return a mask of the blocks of the context in which any of some rows selects a position."""
    each: NDArray[Any] = np.asarray(np.array([wanted(view, row, path) for row in rows]).any(axis=0))
    return np.asarray(np.pad(each, (0, -len(each) % BLOCK_TOKENS)).reshape(-1, BLOCK_TOKENS).any(axis=1))
