"""onnxruntime's operators in plain NumPy, for ONNX's reference evaluator: as documented, slowly."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

OpRun = pytest.importorskip("onnx.reference.op_run", reason="onnx is not installed (extra 'onnx')").OpRun


def unpacked(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes of the last axis, low nibble first, less half their range."""
    values = codes if bits == 8 else np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
    return values.astype(np.float32) - (1 << bits - 1)


class MatMulNBits(OpRun):
    op_domain = "com.microsoft"
    _codes: Any = None

    def _run(self, x: Any, codes: Any, scales: Any, **_: Any) -> tuple[Any]:
        if self._codes is not codes:  # they are the model's, and it runs often
            weights = unpacked(codes, self.bits) * scales[:, :, None]
            self._codes, self._weights = codes, weights.reshape(self.N, -1)[:, : self.K].T.astype(x.dtype)
        return (x @ self._weights,)


class GatherBlockQuantized(OpRun):
    op_domain = "com.microsoft"

    def _run(self, codes: Any, ids: Any, scales: Any, **_: Any) -> tuple[Any]:
        values = unpacked(codes[ids], self.bits)
        return ((values * np.repeat(scales[ids], self.block_size, -1)[..., : values.shape[-1]]).astype(scales.dtype),)


class SkipSimplifiedLayerNormalization(OpRun):
    op_domain = "com.microsoft"

    def _run(self, x: Any, skip: Any, gamma: Any, **_: Any) -> tuple[Any, ...]:
        total = x + skip
        root = np.sqrt((total * total).mean(-1, keepdims=True) + np.float32(self.epsilon))
        return (total / root * gamma).astype(x.dtype), root, root, total


class PagedAttention(OpRun):
    op_domain = "com.microsoft"

    def _run(self, *inputs: Any, **_: Any) -> tuple[Any, ...]:
        query, key, value, keys, values, ends, past, table, cos, sin, *more = inputs
        heads, kv, dim = self.num_heads, self.kv_num_heads, keys.shape[-1]
        if key is None:
            query, key, value = np.split(query, np.cumsum([heads * dim, kv * dim]), axis=-1)
        q, k, v = (part.reshape(len(query), -1, dim).copy() for part in (query, key, value))
        if (norms := more[2:4]) and norms[0] is not None:
            q, k = (x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(self.qk_norm_epsilon)) * norm
                    for x, norm in zip((q, k), norms, strict=True))
        keys, values, out = keys.copy(), values.copy(), np.zeros_like(q)
        rows = keys.shape[1]
        for i, (start, end) in enumerate(pairwise(ends)):
            positions = np.arange(past[i] + end - start)
            places = table[i, positions // rows], positions % rows
            new = positions[past[i] :]
            if getattr(self, "do_rotary", 0):
                q[start:end], k[start:end] = (rotated(x[start:end], cos[new, None], sin[new, None]) for x in (q, k))
            keys[table[i, new // rows], new % rows], values[table[i, new // rows], new % rows] = k[start:end], \
                v[start:end]
            seen_k, seen_v = (np.repeat(pages[places], heads // kv, 1) for pages in (keys, values))
            scores = np.einsum("thd,phd->htp", q[start:end], seen_k) * np.float32(self.scale)
            if cap := np.float32(getattr(self, "softcap", 0)):
                scores = cap * np.tanh(scores / cap)
            hidden = positions > new[:, None]
            if self._window() > 0:
                hidden |= positions <= new[:, None] - self._window()
            scores = np.where(hidden, np.float32(-np.inf), scores)
            if len(more) > 1 and more[1] is not None:
                sinks = np.broadcast_to(more[1][:, None, None], (*scores.shape[:2], 1))
                scores = np.concatenate([scores, sinks], -1)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights = (weights / weights.sum(-1, keepdims=True))[..., : len(positions)]
            out[start:end] = np.einsum("htp,phd->thd", weights, seen_v)
        return (out.reshape(len(query), -1), keys, values)[: len(self.output)]

    def _window(self) -> int:
        return int(getattr(self, "local_window_size", -1))


class RotaryEmbedding(OpRun):
    op_domain = "com.microsoft"

    def _run(self, x: Any, positions: Any, cos: Any, sin: Any, **_: Any) -> tuple[Any]:
        heads = x.reshape(*x.shape[:2], self.num_heads, -1)
        assert cos.shape[1] == self.rotary_embedding_dim // 2
        return (rotated(heads, cos[positions][:, :, None], sin[positions][:, :, None]).reshape(x.shape),)


class QuickGelu(OpRun):
    op_domain = "com.microsoft"

    def _run(self, x: Any, **_: Any) -> tuple[Any]:
        return ((x / (1 + np.exp(-np.float32(self.alpha) * x))).astype(x.dtype),)


def rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Heads of tokens, whose halves turn together, or those of their first elements."""
    n = cos.shape[-1]
    first, second, rest = np.split(x, [n, 2 * n], axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)


class GatherElements(OpRun):
    """onnx's own chooses among 64 arrays at most (1.23.2)."""

    def _run(self, data: Any, indices: Any, axis: int | None = None) -> tuple[Any]:
        return (np.take_along_axis(data, indices, axis or 0),)


OPERATORS = [GatherElements, MatMulNBits, GatherBlockQuantized, SkipSimplifiedLayerNormalization, PagedAttention,
             RotaryEmbedding, QuickGelu]
