"""Reference for attention scores without the sum over V."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ...abi import BLOCK_TOKENS, COUNT_TOKENS, SPLIT_BLOCKS
from ...parameters import ATTENTION
from ..expected import Expected
from ..tolerances import TINY
from ..view import InstructionView, float_of
from .attention import LOWEST, alibi_of, queries_of, score, score_row
from .attention_paths import SPLIT_TOKENS, Path, seen_tokens


def scores_reference(kv: str) -> Callable[[InstructionView], list[Expected]]:
    """The reference of ``attention_scores_<kv>``."""

    def reference(view: InstructionView) -> list[Expected]:
        p, end = view.parameters(ATTENTION), view.count(COUNT_TOKENS)
        first, group = end - view.count(p.rows), p.heads // p.kv_heads
        queries, out = queries_of(view, kv, end), []
        for (t, path, stored), h in itertools.product(seen_tokens(view, kv, first, end), range(p.kv_heads)):
            k, _v, _scales = stored.of(h, path.rows)
            bias = alibi_of(view, h, path.positions, path.position)
            scores, slack = score(queries[t, h], k, float_of(p.cap), bias)
            for g in range(group):
                row = (t - first) * p.heads + h * group + g
                scores[g, ~path.there], slack[g, ~path.there] = np.float32(LOWEST), 0
                out += _row(score_row(view, row), f"token {t}, head {h * group + g}: ", path, scores[g], slack[g])
        return out

    return reference


def _row(where: tuple[NDArray[np.float32], ...], name: str, path: Path, scores: NDArray[np.float64],
         slack: NDArray[np.float64]) -> list[Expected]:
    high = path.low + len(scores)
    begin, end = path.low // BLOCK_TOKENS * BLOCK_TOKENS, -(-high // BLOCK_TOKENS) * BLOCK_TOKENS
    around = (path.low - begin, end - high)  # in blocks of which it sees a part
    seen, off = np.pad(scores, around, constant_values=LOWEST), np.pad(slack, around)
    out = [Expected(name + "scores", where[0][begin:end], seen, False, off)]
    first, last = path.splits.start * SPLIT_BLOCKS, path.splits.stop * SPLIT_BLOCKS
    outside = (begin // BLOCK_TOKENS - first, last - end // BLOCK_TOKENS)  # in splits of which it sees a part
    largest, its_off = (x.reshape(-1, BLOCK_TOKENS).max(axis=1) for x in (seen, off))
    out.append(Expected(name + "blocks", where[3][first:last], np.pad(largest, outside, constant_values=LOWEST), False,
                        np.pad(its_off, outside)))
    for split in path.splits:
        start, stop = max(path.low, split * SPLIT_TOKENS), min(high, (split + 1) * SPLIT_TOKENS)
        part, off = scores[start - path.low : stop - path.low], slack[start - path.low : stop - path.low].max()
        total = np.exp(part - part.max()).sum()
        if part.max() == np.float32(LOWEST):  # nothing of it is there, and all positions of its blocks are alike
            total = BLOCK_TOKENS * (-(-stop // BLOCK_TOKENS) - start // BLOCK_TOKENS)
        out.append(Expected(name + f"split {split}", where[1][split], np.array([part.max(), total]), False,
                            np.array([off, 2 * off * total + TINY])))
    return out
