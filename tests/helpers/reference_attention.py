"""Attention of the oracle (reference.py): heads, latent attention, K and V stored for later tokens."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .reference_parts import frequencies, normalised, rotated


def rope_store(state: Any, op: Any, qkv: np.ndarray) -> np.ndarray:
    """Rotate q and k; element i of a head turns with element i + head_dim / 2."""
    widths = np.cumsum([op.heads * op.head_dim, op.kv_heads * op.head_dim, op.kv_heads * op.head_dim])
    *parts, beside = np.split(qkv, widths, axis=1)
    q, k, v = (part.reshape(len(qkv), -1, op.head_dim) for part in parts)
    if op.keys_as_values:
        v = k
    if op.value_norm:
        v = normalised(v, op.eps)
    if op.weights:
        q, k = (normalised(x, op.eps) * state.whole(w) for x, w in zip((q, k), op.weights, strict=True))
    q, k = (_turned(state, op, x) for x in (q, k))
    state.stored[op.layer] = k, v
    return np.concatenate([*(x.reshape(len(qkv), -1) for x in (q, k, v)), beside], axis=1)


def rotate_queries(state: Any, op: Any, q: np.ndarray) -> np.ndarray:
    """The same of queries alone, or of those that stand beside keys and values."""
    q, beside = np.split(q, [op.heads * op.head_dim], axis=1)
    heads = q.reshape(len(q), -1, op.head_dim)
    heads = normalised(heads, op.eps) * state.whole(op.q_norm) if op.q_norm else heads
    return np.concatenate([_turned(state, op, heads).reshape(q.shape), beside], axis=1)


def _turned(state: Any, op: Any, x: np.ndarray) -> np.ndarray:
    """Heads whose pairs have turned; of a proportional rotation (Gemma 4) most pairs of whole heads stand still."""
    if not op.rotary:
        return x
    rope, n = state.config.local_rope if op.table else state.config.rope, op.rotary
    if rope.kind == "query_scale":
        spans = np.floor(np.arange(len(x)) / rope.original_max_position_embeddings)
        return (x * (1 + rope.factor * np.log(1 + spans))[:, None, None]).astype(state.dtype)
    if rope.kind == "proportional":
        turning, n = op.rotary // 2, rope.span
        still = [0.0] * (n // 2 - turning)
        rates = np.array([rope.theta ** (-2 * i / n) / rope.factor for i in range(turning)] + still)
    else:
        rates = frequencies(rope, n, state.context)
    angles = np.arange(len(x))[:, None, None] * rates
    cos, sin = (f(angles) * rope.attention_factor for f in (np.cos, np.sin))
    return np.concatenate([rotated(x[..., :n], cos, sin), x[..., n:]], axis=-1).astype(state.dtype)


def attention(state: Any, op: Any, qkv: np.ndarray) -> np.ndarray:
    """Softmax of q k^T / sqrt(head_dim) over the tokens that a query may see."""
    c, group = state.config, op.heads // op.kv_heads
    k, v = (np.repeat(x, group, axis=1) for x in state.stored[op.layer if op.kv_layer is None else op.kv_layer])
    q = qkv[:, : op.heads * op.head_dim].reshape(len(qkv), op.heads, op.head_dim)
    scores = np.einsum("qhd,khd->hqk", q, k) * state.dtype(c.attention_scale or 1 / math.sqrt(op.head_dim))
    if c.attention_softcap:
        scores = state.dtype(c.attention_softcap) * np.tanh(scores / state.dtype(c.attention_softcap))
    distance = np.arange(len(q))[:, None] - np.arange(len(q))
    if c.alibi:
        scores = scores + _alibi(c, len(q), distance).astype(state.dtype)
    window = op.window or len(q)
    scores = np.where((distance >= 0) & (distance < window), scores, -np.inf)
    if op.sinks:
        sinks = np.broadcast_to(state.whole(op.sinks)[:, None, None], (*scores.shape[:2], 1))
        scores = np.concatenate([scores, sinks], axis=-1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = (weights / weights.sum(axis=-1, keepdims=True))[..., : len(q)]
    return np.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1)


def _alibi(c: Any, n: int, distance: np.ndarray) -> np.ndarray:
    """Slope x distance of each head; Falcon's has slope, position and product in bfloat16."""
    below = 2 ** int(math.log2(c.num_attention_heads))
    slopes = [2.0 ** (-c.alibi.max_bias * (i + 1) / below) for i in range(below)]
    slopes += [2.0 ** (-c.alibi.max_bias * (i + 0.5) / below) for i in range(c.num_attention_heads - below)]
    if not c.alibi.bfloat16:
        return -np.array(slopes)[:, None, None] * distance
    keys = _to_bfloat16(_to_bfloat16(np.array(slopes))[:, None] * _to_bfloat16(np.arange(n)))
    return keys[:, None] * (c.attention_scale or c.head_dim**-0.5)


def _to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Eight bits of each number, ties to even."""
    bits, power = np.frexp(x)
    return np.ldexp(np.rint(256 * bits) / 256, power)


def quantize_heads(state: Any, op: Any, x: np.ndarray) -> np.ndarray:
    """The pieces of all heads, each with a row for each token."""
    heads, width = op.out.times, op.out.width
    return x[:, : heads * width].reshape(len(x), heads, width).swapaxes(0, 1).reshape(-1, width)


def head_linear(state: Any, op: Any, x: np.ndarray) -> np.ndarray:
    """Each head's piece times its own matrix, each to its columns; others are nobody's yet."""
    matrices = state.whole(op.weight)
    matrices = matrices.reshape(op.heads, -1, matrices.shape[1])
    if x.shape[1] == matrices.shape[2]:
        pieces = x.reshape(op.heads, -1, x.shape[1]).swapaxes(0, 1)
    else:
        pieces = x[:, : op.heads * matrices.shape[2]].reshape(len(x), op.heads, -1)
    out = np.full((len(pieces), op.out.width), np.nan, state.dtype)
    for head, matrix in enumerate(matrices):
        out[:, head * op.step : head * op.step + len(matrix)] = pieces[:, head] @ matrix.T
    return out


def store_latent(state: Any, op: Any, queries: np.ndarray, q: np.ndarray, compressed: np.ndarray) -> np.ndarray:
    """Queries with their rotated parts, then the key: the normed latent and its rotated part."""
    width, n = op.rank + op.rotary, len(q)
    angles = np.arange(n)[:, None, None] * frequencies(state.config.rope, op.rotary, state.context)
    cos, sin = (f(angles) * state.config.rope.attention_factor for f in (np.cos, np.sin))
    latent = compressed[:, op.first : op.first + op.rank]
    key = compressed[:, None, op.first + op.rank : op.first + width]
    turned = q[:, op.q_first : op.q_first + op.heads * op.rotary].reshape(n, op.heads, op.rotary)
    rows = queries.reshape(n, op.heads + 1, width).copy()
    rows[..., op.rank :] = rotated(np.concatenate([turned, key], axis=1), cos, sin)
    rows[:, -1, : op.rank] = normalised(latent, op.eps) * state.whole(op.norm)
    state.stored[op.layer] = rows[:, -1], rows[:, -1, : op.rank]
    return rows.reshape(n, -1)


def latent_attention(state: Any, op: Any, queries: np.ndarray) -> np.ndarray:
    """All heads over the one stored key; V is its beginning."""
    (k, v), n = state.stored[op.layer], len(queries)
    q = queries.reshape(n, -1, op.head_dim)[:, : op.heads]
    scores = np.einsum("qhd,kd->hqk", q, k) * state.dtype(op.scale)
    scores = np.where(np.arange(n)[:, None] >= np.arange(n), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,kd->qhd", weights, v).reshape(n, -1)
