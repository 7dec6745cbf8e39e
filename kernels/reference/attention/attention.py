"""References of attention: softmax(q K^T / sqrt(n)) V over the rows that each token may see, whole or in splits of the
context.

The rows that a token may see are a path: all rows of its sequence before TOKEN_BASE, those of TOKEN_MASK up to its own,
and its own; of these the last `window`, but for rows that the layer lacks (FLAG_PRUNED). Splits and lanes count
positions in the path, not rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.quant import KV_TYPES

from ...abi import (
    BLOCK_TOKENS,
    COUNT_MERGE,
    COUNT_TOKENS,
    FLAG_ALIBI,
    FLAG_ALIBI_BF16,
    FLAG_LAST,
    FLAG_SINKS,
    INSTEAD_MEAN,
    INSTEAD_NOTHING,
    MASK_TOKENS,
    MEAN_BLOCKS,
    SPLIT_BLOCKS,
    padded_head_dim,
    score_row_bytes,
)
from ...parameters import ATTENTION
from ..elementwise import quantise_rows
from ..expected import Expected
from ..tolerances import TINY, TOLERANCES
from ..view import InstructionView, float_of
from .attention_paths import SPLIT_TOKENS, Doubles, Path, Stored, paths, seen_tokens, value_dim

LOWEST = float(np.float32(-1e30))
"""Score of rows that a token does not see in a block of which it sees a part, or that the layer lacks; largest score of
a split of which nothing counts."""
NEVER = LOWEST / 2
"""Less than any score of a stored row: a threshold that selects everything."""


class Partial(NamedTuple):
    """Attention over some positions, not yet divided; arrays over (heads of one KV head)."""

    largest: Doubles
    """Largest score."""
    weights: Doubles
    """exp(score - largest) of each position: (heads, positions)."""
    total: Doubles
    """Weighted sum of V: (heads, n)."""
    slack: Doubles
    """Largest distance of float32 from `total`: (heads, n)."""
    relative: Doubles
    """Largest distance of float32 from a weight, as a share of it: (heads,)."""


def score(q: Doubles, k: Doubles, cap: float = 0.0, bias: Doubles | None = None) -> tuple[Doubles, Doubles]:
    """Scores (heads, positions) of scaled queries, capped if there is a cap, and how far float32 may be from each.

    A cap is cap x tanh(score / cap) (Gemma 2, arXiv 2408.00118); `bias` (heads, positions) is added after it.
    """
    scores, slack = q @ k.T, TOLERANCES["attention"] * (1 + np.abs(q) @ np.abs(k).T)
    if cap:
        scores, slack = cap * np.tanh(scores / cap), slack + TOLERANCES["soft_cap"] * cap
    return (scores, slack) if bias is None else (scores + bias, slack + TOLERANCES["attention"] * np.abs(bias))


def attend(q: Doubles, k: Doubles, v: Doubles, v_scales: Doubles | None = None, cap: float = 0.0,
           bias: Doubles | None = None) -> Partial:
    """Attention of the query heads that share a KV head; q, scaled, is (heads, n), k and v are (positions, n).

    With int8 KV weights may be rounded: times the scale of their V row, to a share of the largest of these.
    """
    scores, slack = score(q, k, cap, bias)
    return weigh(scores, slack.max(axis=1), v, v_scales)


def weigh(scores: Doubles, relative: Doubles, v: Doubles, v_scales: Doubles | None) -> Partial:
    """Sum of V with weights by scores (heads, positions), which make weights that may be off by so much."""
    largest = scores.max(axis=1)
    weights = np.exp(scores - largest[:, None])
    slack = relative[:, None] * (weights @ np.abs(v)) + TINY
    if v_scales is not None:
        codes = np.divide(v, v_scales[:, None], out=np.zeros_like(v), where=v_scales[:, None] > 0)
        slack += TOLERANCES["weight"] * (weights * v_scales).max(axis=1)[:, None] * np.abs(codes).sum(axis=0)
    return Partial(largest, weights, weights @ v, slack, relative)


def effective_queries(q: NDArray[np.float32], scale: float, kv: str) -> Doubles:
    """Queries as the products see them: scaled, and where KV is codes rounded to int8 with one scale a head."""
    if not KV_TYPES[kv].scaled:
        return q.astype(np.float64) * scale
    codes, scales = quantise_rows(q.reshape(q.size // q.shape[-1], q.shape[-1]), q.shape[-1])
    return (np.rint(codes).astype(np.float64) * (scales * np.float32(scale))).reshape(q.shape)


def queries_of(view: InstructionView, kv: str, tokens: int) -> Doubles:
    """Queries of the first tokens as the products see them: (tokens, KV heads, heads of each, n)."""
    p = view.parameters(ATTENTION)
    group = p.heads // p.kv_heads
    shape, strides = (tokens, p.kv_heads, group, p.head_dim), (p.q_stride, 4 * p.head_dim * group, 4 * p.head_dim, 4)
    return effective_queries(view.array(0, np.float32, shape, strides), float_of(p.scale), kv)


def sinks_of(view: InstructionView) -> Doubles | None:
    """Logits of query heads that take part in a softmax and have no V."""
    if not view.flags & FLAG_SINKS:
        return None
    return view.array(8, np.float32, (view.parameters(ATTENTION).heads,)).astype(np.float64)


def to_bfloat16(x: Doubles) -> Doubles:
    """The nearest bfloat16 of numbers that float32 has, ties to even."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.int64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & ~0xFFFF).astype(np.uint32).view(np.float32).astype(np.float64)


def alibi_of(view: InstructionView, h: int, positions: NDArray[np.int64], position: int) -> Doubles | None:
    """Return ALiBi's bias of the scores of KV head h, (heads, keys), for keys at some positions and a query at one.

    It is slope x (key - query) (arXiv 2108.12409), with the slope of each query head; or, for Falcon, the difference of
    two products in bfloat16, times the scale of scores.
    """
    p = view.parameters(ATTENTION)
    if not view.flags & FLAG_ALIBI:
        return None
    slopes = view.array(9, np.float32, (p.kv_heads, p.heads // p.kv_heads, 1))[h].astype(np.float64)
    if not view.flags & FLAG_ALIBI_BF16:
        return slopes * (positions - position)
    keys, query = (to_bfloat16(slopes * to_bfloat16(x.astype(np.float64))) for x in (positions, np.array([position])))
    return (keys - query) * float_of(p.scale)


def first_split(view: InstructionView) -> int:
    """The first token whose attention is computed in splits."""
    return view.count(COUNT_TOKENS) - view.count(COUNT_MERGE)


def attention_reference(kv: str) -> Callable[[InstructionView], list[Expected]]:
    """The reference of ``attention_<kv>``."""

    def reference(view: InstructionView) -> list[Expected]:
        p = view.parameters(ATTENTION)
        tokens = view.count(p.rows)
        whole = min(first_split(view), tokens)
        queries = queries_of(view, kv, tokens)
        out: list[Expected] = []
        n = value_dim(p)
        y, slack = np.zeros((2, *queries.shape[:3], n))
        for (t, path, stored), h in itertools.product(seen_tokens(view, kv, 0, tokens), range(p.kv_heads)):
            if t >= whole:
                out += _splits(view, t, h, queries[t, h], stored, path)
                continue
            bias = alibi_of(view, h, path.positions[path.there], path.position)
            part = attend(queries[t, h], *stored.of(h, path.rows[path.there]), float_of(p.cap), bias)
            total = part.weights.sum(axis=1, keepdims=True)
            if (sinks := sinks_of(view)) is not None:
                total += np.exp(sinks.reshape(p.kv_heads, -1)[h] - part.largest)[:, None]
            y[t, h], slack[t, h] = part.total / total, 2 * part.slack / total
        where = view.array(1, np.float32, (whole, p.heads * n), (p.out_stride, 4))
        out.append(Expected("out", where, y[:whole].reshape(where.shape), False, slack[:whole].reshape(where.shape)))
        return out

    return reference


def score_row(view: InstructionView, row: int) -> tuple[NDArray[np.float32], ...]:
    """Live views of the scores of row token * heads + head: by position, (largest, sum of exponentials) by split,
    choice, largest by block.
    """
    splits = view.parameters(ATTENTION).splits
    at = row * score_row_bytes(splits)
    largest = at + 4 * splits * SPLIT_TOKENS
    sums = largest + 4 * splits * SPLIT_BLOCKS
    return (view.array(5, np.float32, (splits * SPLIT_TOKENS,), at=at),
            view.array(5, np.float32, (splits, 2), at=sums),
            view.array(5, np.float32, (4,), at=sums + 8 * splits),
            view.array(5, np.float32, (splits * SPLIT_BLOCKS,), at=largest))


def mean_of(view: InstructionView, row: int) -> NDArray[np.float32]:
    """Live view of the mean of V of row token * KV heads + KV head, with its padding; then how many rows it is of."""
    p = view.parameters(ATTENTION)
    padded = padded_head_dim(p.head_dim)
    return view.array(7, np.float32, (padded + 1,), at=(4 * padded + 64) * row)


def mean_blocks(position: int) -> range:
    """Return the blocks of the context whose mean stands for the rows that a token at a position leaves out."""
    below, step = max(position - MASK_TOKENS + 1, 0) // BLOCK_TOKENS, 1
    while below > MEAN_BLOCKS * step:
        step *= 2
    return range(step // 2, below, step)


def partials(view: InstructionView, row: int, split: int) -> tuple[NDArray[np.float32], ...]:
    """Live views of one split's result of row token * heads + head: m (1,), l (16,), acc (n,), the padding of acc."""
    p = view.parameters(ATTENTION)
    n = value_dim(p)
    padded = padded_head_dim(n)
    at = (row * p.splits + split) * (128 + 4 * padded)
    acc = view.array(4, np.float32, (padded,), at=at + 128)
    m, total = view.array(4, np.float32, (1,), at=at), view.array(4, np.float32, (16,), at=at + 64)
    return m, total, acc[:n], acc[n:]


def _splits(view: InstructionView, t: int, h: int, q: Doubles, stored: Stored, path: Path) -> list[Expected]:
    """Partial results of token t, KV head h: largest score, weights summed by position modulo 16, weighted sum of V."""
    p = view.parameters(ATTENTION)
    out, high, first = [], path.low + len(path.rows), (t - first_split(view)) * p.heads + h * len(q)
    for split in path.splits:
        start, end = max(path.low, split * SPLIT_TOKENS), min(high, (split + 1) * SPLIT_TOKENS)
        mine = slice(start - path.low, end - path.low)
        there = path.there[mine]
        if not there.any():  # of the rest only that it is finite
            firsts = [partials(view, first + g, split) for g in range(len(q))]
            out += [Expected(f"split {split} of token {t}, without a row", m, np.full(1, LOWEST)) for m, *_ in firsts]
            continue
        bias = alibi_of(view, h, path.positions[mine][there], path.position)
        part = attend(q, *stored.of(h, path.rows[mine][there]), float_of(p.cap), bias)
        lanes = np.zeros((len(q), SPLIT_TOKENS))
        lanes[:, start % SPLIT_TOKENS + np.flatnonzero(there)] = part.weights
        sums = lanes.reshape(len(q), SPLIT_BLOCKS, BLOCK_TOKENS).sum(axis=1)
        for g in range(len(q)):
            m, total, acc, padding = partials(view, first + g, split)
            name = f"split {split} of token {t}, head {h * len(q) + g}: "
            out += [
                Expected(name + "m", m, part.largest[g : g + 1], False, part.relative[g]),
                Expected(name + "l", total, sums[g], False, part.relative[g] * sums[g] + TINY),
                Expected(name + "acc", acc, part.total[g], False, part.slack[g]),
                Expected(name + "padding", padding, np.zeros(padding.shape)),
            ]
    return out


def merge_reference(view: InstructionView) -> list[Expected]:
    """The reference of ``attention_merge``: sum of e^m acc over sum of e^m l, or, where something was left out, over
    that of all exponentials."""
    p = view.parameters(ATTENTION)
    end = view.count(COUNT_TOKENS) if view.flags & FLAG_LAST else view.count(p.rows)
    first = end - view.count(p.rows) if view.flags & FLAG_LAST else min(first_split(view), end)
    seen, group = paths(view, end, p.window)[first:], p.heads // p.kv_heads
    y, slack = np.zeros((2, len(seen) * p.heads, value_dim(p)))
    for row in range(len(y)):
        path = seen[row // p.heads]
        found = (partials(view, row, split)[:3] for split in path.splits)
        parts = zip(*(part for part in found if part[0][0] > LOWEST), strict=True)
        m, sums, acc = (np.array(part, np.float64) for part in parts)
        sinks = sinks_of(view)
        sink = np.full(1, -np.inf) if sinks is None else sinks[row % p.heads :][:1]
        share, spread = np.exp(m - m.max()), np.ptp(np.append(m, sink[np.isfinite(sink)]))
        total, add = (share * sums).sum() + float(np.exp(sink[0] - m.max())), 0.0
        mean = mean_of(view, row // group) if p.instead == INSTEAD_MEAN else np.zeros(1, np.float32)
        choice = score_row(view, row)[2] if view.flags & FLAG_LAST else np.full(4, NEVER)
        if choice[0] > NEVER and (p.instead == INSTEAD_NOTHING or mean[-1] > 0):
            read, total = total, float(choice[3])
            if len(mean) > 1:
                add = max(1 - read / total, 0.0) * mean[: p.head_dim].astype(np.float64)
                slack[row] = TOLERANCES["sums"] * np.abs(mean[: p.head_dim])
        y[row] = (share * acc).sum(axis=0) / total + add
        slack[row] += TOLERANCES["attention"] * (1 + spread) * ((share * np.abs(acc)).sum(axis=0) / total)
    shape = len(seen), p.heads * value_dim(p)
    where = view.array(1, np.float32, shape, (p.out_stride, 4), first * p.out_stride)
    return [Expected("out", where, y.reshape(where.shape), exact=False, tolerance=slack.reshape(where.shape) + TINY)]
