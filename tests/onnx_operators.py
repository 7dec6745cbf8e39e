"""onnxruntime's operators in plain NumPy, for ONNX's reference evaluator: what their documentation says, slowly."""

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

    def _run(self, x: Any, codes: Any, scales: Any, **_: Any) -> tuple[Any]:
        weights = unpacked(codes, self.bits) * scales[:, :, None]
        return (x @ weights.reshape(self.N, -1)[:, : self.K].T.astype(x.dtype),)


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
        q, k, v = (part.reshape(len(query), -1, dim) for part in (query, key, value))
        if (norms := more[2:4]) and norms[0] is not None:
            q, k = (x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(self.qk_norm_epsilon)) * norm
                    for x, norm in zip((q, k), norms, strict=True))
        keys, values, out = keys.copy(), values.copy(), np.zeros_like(q)
        rows = keys.shape[1]
        for i, (start, end) in enumerate(pairwise(ends)):
            places = [(table[i, p // rows], p % rows) for p in range(past[i] + end - start)]
            for t in range(start, end):
                position = past[i] + t - start
                q[t], k[t] = (rotated(x[t], cos[position], sin[position]) for x in (q, k))
                keys[places[position]], values[places[position]] = k[t], v[t]
                first = max(0, position + 1 - self._window()) if self._window() > 0 else 0
                seen_k, seen_v = (np.stack([pages[place] for place in places[first : position + 1]])
                                  for pages in (keys, values))
                for head in range(heads):
                    scores = seen_k[:, head * kv // heads] @ q[t, head] * self.scale
                    weights = np.exp(scores - scores.max())
                    out[t, head] = weights / weights.sum() @ seen_v[:, head * kv // heads]
        return out.reshape(len(query), -1), keys, values

    def _window(self) -> int:
        return int(getattr(self, "local_window_size", -1))


def rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Heads of a token, whose halves turn together."""
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


OPERATORS = [MatMulNBits, GatherBlockQuantized, SkipSimplifiedLayerNormalization, PagedAttention]
