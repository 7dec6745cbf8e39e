"""Reference of `rope_store`: rotary embedding in place, and a token's K and V in the layer's blocks.

In a layer first come all K, then all V, then, of codes, all scales: head by head the blocks, of 16 tokens each. A block
of scales has 16 of K and 16 of V; `edgeinfer.quant.kv` says how K and V are in a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from edgeinfer.quant import KV_TYPES, KvType
from edgeinfer.quant import kv as layouts

from ..abi import (
    BLOCK_TOKENS,
    FLAG_HEAD_NORM,
    FLAG_KEYS_AS_VALUES,
    FLAG_QUERIES,
    FLAG_VALUE_NORM,
    TOKEN_POSITION,
    padded_head_dim,
)
from ..parameters import ROPE
from .elementwise import rms_norm
from .expected import Expected
from .tolerances import TINY, TOLERANCES
from .view import InstructionView, float_of

Doubles = NDArray[np.float64]


def rotate(x: Doubles, cos: Doubles, sin: Doubles) -> Doubles:
    """Rotate the pairs (x[i], x[i + n/2]) of the last axis (arXiv 2104.09864, in the order of "rotate half").

    Parameters
    ----------
    x : array of shape (T, heads, n)
    cos, sin : arrays of shape (T, n / 2)
    """
    a, b = np.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def head_views(
    view: InstructionView, kind: KvType, head_dim: int, block_bytes: int, blocks: int, kv_heads: int, slot: int
) -> tuple[NDArray, NDArray, NDArray, NDArray]:
    """One token's K as `key_view` has it, V (kv_heads, stored elements) and their scales (kv_heads,), live."""
    stored = kind.element_bytes(padded_head_dim(head_dim))
    block, row = divmod(slot, BLOCK_TOKENS)
    head_bytes, plane = blocks * block_bytes, kv_heads * blocks * block_bytes
    k = key_view(view, 2, kind, (kv_heads, head_dim, head_bytes), block * block_bytes, row)
    dtype, apart_rows = np.dtype(layouts.element_type(kind)), kind.alternating
    at = plane + block * block_bytes + row // apart_rows * apart_rows * stored + row % apart_rows
    v = view.array(2, dtype, (kv_heads, stored // dtype.itemsize), (head_bytes, apart_rows * dtype.itemsize), at=at)
    n_scaled = kv_heads if kind.scaled else 0
    scales, apart = 2 * plane + 4 * BLOCK_TOKENS * block + 2 * row, (4 * BLOCK_TOKENS * blocks,)
    k_scales = view.array(2, np.float16, (n_scaled,), apart, at=scales)
    v_scales = view.array(2, np.float16, (n_scaled,), apart, at=scales + 2 * BLOCK_TOKENS)
    return k, v, k_scales, v_scales


def key_view(view: InstructionView, operand: int, kind: KvType, heads: tuple[int, int, int], at: int,
             row: int) -> NDArray:
    """One token's K in a block, live: (heads, pieces, stored elements of a piece); `heads` are how many, their size and
    the bytes from one to the next. Codes smaller than a byte share an element.
    """
    (n, head_dim, apart), dtype = heads, np.dtype(layouts.element_type(kind))
    pieces = kind.element_bytes(padded_head_dim(head_dim)) // kind.piece
    return view.array(operand, dtype, (n, pieces, kind.piece // dtype.itemsize),
                      (apart, BLOCK_TOKENS * kind.piece, dtype.itemsize), at=at + row * kind.piece)


def stored_rows(name: str, kind: KvType, where: NDArray, scales: NDArray, x: Doubles, slack: Doubles
                ) -> list[Expected]:
    """Expected K or V of one token; x of shape (kv_heads, n), known up to `slack` of the same shape."""
    read = partial(layouts.elements, kv=kind) if kind.bits < 8 else None
    shape = (read(where) if read else where).shape
    whole, loose = np.zeros((2, len(x), math.prod(shape[1:])))
    whole[:, : x.shape[1]], loose[:, : x.shape[1]] = x, slack
    whole, loose = whole.reshape(shape), loose.reshape(shape)
    if kind.scaled:
        highest = kind.highest
        largest = np.abs(x).max(axis=1) / highest
        spread = slack.max(axis=1) / highest

        def codes() -> Doubles:
            """x / stored scale: a head whose scale is 0 in fp16 is stored as zeros."""
            by = scales.astype(np.float64).reshape(len(x), *(1,) * (len(shape) - 1))
            return np.clip(np.divide(whole, by, out=np.zeros_like(whole), where=by != 0), -highest, highest)

        tolerance = TOLERANCES["fp16"] * largest + spread + 2.0**-24  # a unit in the last place, also of a subnormal
        return [
            Expected(f"{name} scales", scales, largest, exact=False, tolerance=tolerance),
            Expected(name, where, codes, exact=False, tolerance=TOLERANCES["code"], read=read),
        ]
    if kind.bits == 16:
        with np.errstate(over="ignore"):
            rounded = whole.astype(np.float32).astype(np.float16)
        step = np.where(loose > 0, TOLERANCES["fp16"] * np.abs(whole) + 2.0**-24, 0)
        return [Expected(name, where, rounded, exact=False, tolerance=loose + step)]
    return [Expected(name, where, whole, exact=False, tolerance=loose)]


def rope_store_reference(kv: str) -> Callable[[InstructionView], list[Expected]]:
    """The reference of ``rope_store_<kv>``."""

    def reference(view: InstructionView) -> list[Expected]:
        p = view.parameters(ROPE)
        n_tokens = view.count(p.rows)
        positions, slots = view.tokens(TOKEN_POSITION)[:n_tokens], view.slots(p.recent)[:n_tokens]
        half, n_keys = p.rotary // 2, 0 if view.flags & FLAG_QUERIES else p.kv_heads
        n_rotated = p.heads + n_keys
        rows = view.array(0, np.float32, (n_tokens, n_rotated + n_keys, p.head_dim), (p.stride, 4 * p.head_dim, 4))
        shape, strides = (int(positions.max(initial=-1)) + 1, 2, half), (p.table_stride, p.table_stride // 2, 4)
        table = view.array(1, np.float32, shape, strides)
        cos, sin = table[positions].astype(np.float64).transpose(1, 0, 2)
        live, v = rows[:, :n_rotated], rows[:, n_rotated:].astype(np.float64)
        x = live.astype(np.float64)
        if view.flags & FLAG_HEAD_NORM:
            eps = float_of(p.eps)
            x[:, : p.heads] = rms_norm(x[:, : p.heads], view.array(3, np.float32, (p.head_dim,)), eps)
            if n_keys:
                x[:, p.heads :] = rms_norm(x[:, p.heads :], view.array(4, np.float32, (p.head_dim,)), eps)
        turned, sizes = x.copy(), np.abs(x)
        pairs = np.r_[0:half, p.apart : p.apart + half]
        turned[..., pairs] = rotate(x[..., pairs], cos, sin)
        sizes[..., pairs] = sizes_of_pairs(x[..., pairs], cos, sin)
        relative = TOLERANCES["rope"] + (TOLERANCES["rms_norm"] if view.flags & FLAG_HEAD_NORM else 0)
        slack = relative * sizes + TINY
        out = [Expected("q and k", live, turned, exact=False, tolerance=slack)]
        if view.flags & FLAG_QUERIES:
            return out
        loose = np.zeros_like(v)
        if view.flags & (FLAG_VALUE_NORM | FLAG_KEYS_AS_VALUES):
            v = rows[:, p.heads : n_rotated].astype(np.float64) if view.flags & FLAG_KEYS_AS_VALUES else v
            if view.flags & FLAG_VALUE_NORM:
                v = rms_norm(v, np.ones(p.head_dim), float_of(p.eps))
            loose = TOLERANCES["rms_norm"] * np.abs(v) + TINY
            out.append(Expected("v", rows[:, n_rotated:], v, exact=False, tolerance=loose))
        kind = KV_TYPES[kv]
        for t, slot in enumerate(slots):
            k_at, v_at, k_scales, v_scales = head_views(
                view, kind, p.head_dim, p.block_bytes, p.blocks, p.kv_heads, int(slot)
            )
            out += stored_rows(f"K of token {t}", kind, k_at, k_scales, turned[t, p.heads :], slack[t, p.heads :])
            out += stored_rows(f"V of token {t}", kind, v_at, v_scales, v[t], loose[t])
        return out

    return reference


def sizes_of_pairs(x: Doubles, cos: Doubles, sin: Doubles) -> Doubles:
    """|a cos| + |b sin| and |b cos| + |a sin|, the base of rounding errors."""
    a, b = np.split(np.abs(x), 2, axis=-1)
    cos, sin = np.abs(cos)[:, None], np.abs(sin)[:, None]
    return np.concatenate([a * cos + b * sin, b * cos + a * sin], axis=-1)
