"""Rotary embedding (arXiv 2104.09864) of q and k, and storing of k and v in the layer's KV blocks.

A block of 16 tokens has per KV head: K in tiles (int8: lines of 16 tokens x 4 dims; f16, f32: lines of 16 tokens per
dim), V in rows (f16, f32) or lines of 4 tokens x 16 dims (int8), and for int8 the fp16 scales of the 16 K and the 16 V
rows, each in a plane of its own (abi.BLOCK_TOKENS). A scale is of one token and head: max|x| divided by 127.

Operands: 0 qkv rows, 1 table (per position cos then sin, each padded to 16), 2 the layer's blocks, 3 q norm, 4 k norm.
Reference: reference/rope.py.
"""

from __future__ import annotations

from ..abi import (
    BLOCK_TOKENS,
    CTX_TOKENS,
    FLAG_HEAD_NORM,
    FLAG_KEYS_AS_VALUES,
    FLAG_QUERIES,
    FLAG_VALUE_NORM,
    TOKEN_BYTES,
    TOKEN_POSITION,
    TOKEN_SLOT,
)
from ..parameters import ROPE
from ..registry import kernel
from ..vector.instruction import claim, count, flags, float_parameter, inline, operand, parameter, round_up_16, token
from ..vector.lanes import clamp_i8, first_lane, keep_first, max_lanes, round_to_i32, splat_f32, vabs, vmax
from ..vector.memory import (
    load_f32x16,
    load_i32,
    load_i64,
    scatter_f32,
    scatter_i8,
    scatter_i8x4,
    store_f32x16,
    store_first,
    store_i16,
)
from ..vector.scalars import div_f32, div_i64
from ..vector.targets import f16_bits, f32_from_f16_bits, fma, scatter_f16, store_f16x16
from .attention.attention_paths import block_parts, value_at
from .elementwise import norm_scale


@inline
def rotate(head, table, n, apart, table_stride):
    """Rotate pairs (x[i], x[i + apart]) of n elements in place; the table row holds cos, then sin half a row later."""
    middle = n >> 1
    second = head + 4 * apart
    for i in range(0, middle, 16):
        cos, sin = load_f32x16(table + 4 * i), load_f32x16(table + (table_stride >> 1) + 4 * i)
        a, b = load_f32x16(head + 4 * i), load_f32x16(second + 4 * i)
        store_first(head + 4 * i, fma(a, cos, splat_f32(0.0) - b * sin), min(16, middle - i))
        store_first(second + 4 * i, fma(b, cos, a * sin), min(16, middle - i))


@inline
def norm_head(head, weight, n, eps):
    """RMS norm of one head, in place (Qwen3)."""
    scale = splat_f32(norm_scale(head, n, eps))
    for i in range(0, n, 16):
        store_first(head + 4 * i, load_f32x16(head + 4 * i) * scale * load_f32x16(weight + 4 * i), min(16, n - i))


@inline
def make_value(v, source, n, eps, normed):
    """Write a head of v, its source after RMS norm without a weight where it is `normed` (Gemma 4)."""
    scale = splat_f32(1.0)
    if normed:
        scale = splat_f32(norm_scale(source, n, eps))
    for i in range(0, n, 16):
        store_first(v + 4 * i, load_f32x16(source + 4 * i) * scale, min(16, n - i))


@inline
def head_scale(head, n):
    """fp16 bits of max|x| / 127 of a head."""
    largest = splat_f32(0.0)
    for i in range(0, n, 16):
        largest = vmax(largest, vabs(keep_first(load_f32x16(head + 4 * i), n - i)))
    return f16_bits(first_lane(splat_f32(max_lanes(largest)) * splat_f32(1.0 / 127.0)))


@inline
def quantised(head, i, n, inverse):
    """16 elements of a head from element i on, as int8 values in 32-bit lanes."""
    return clamp_i8(round_to_i32(keep_first(load_f32x16(head + 4 * i), n - i) * inverse))


@inline
def inverse_of(bits):
    """1 / scale, or 0 if the scale is 0."""
    scale = f32_from_f16_bits(bits)
    if bits == 0:
        return splat_f32(0.0)
    return splat_f32(div_f32(first_lane(splat_f32(1.0)), scale))


@inline
def slot_of(ctx, t, recent):
    """Return the slot of token t's K and V, by one of its sequence's block tables."""
    return load_i32(load_i64(ctx + CTX_TOKENS) + TOKEN_BYTES * t + TOKEN_SLOT + 4 * recent)


@inline
def store_int8(k, v, parts, slot, n):
    """Quantise and store one token's head of K and V."""
    keys, values, scales = parts
    bits = head_scale(k, n)
    store_i16(scales + 2 * slot, bits)
    inverse = inverse_of(bits)
    for i in range(0, n, 16):
        scatter_i8x4(keys + 16 * i + 4 * slot, quantised(k, i, n, inverse), 64)
    bits = head_scale(v, n)
    store_i16(scales + 2 * BLOCK_TOKENS + 2 * slot, bits)
    inverse = inverse_of(bits)
    for i in range(0, n, 16):
        scatter_i8(value_at(values, slot, round_up_16(n)) + 4 * i, quantised(v, i, n, inverse), 4)


@inline
def store_f16(k, v, parts, slot, n):
    """Store one token's head of K and V as fp16."""
    keys, values, _scales = parts
    row = values + 2 * round_up_16(n) * slot
    for i in range(0, n, 16):
        scatter_f16(keys + 32 * i + 2 * slot, keep_first(load_f32x16(k + 4 * i), n - i), 32)
        store_f16x16(row + 2 * i, keep_first(load_f32x16(v + 4 * i), n - i))


@inline
def store_f32(k, v, parts, slot, n):
    """Store one token's head of K and V as they are."""
    keys, values, _scales = parts
    row = values + 4 * round_up_16(n) * slot
    for i in range(0, n, 16):
        scatter_f32(keys + 64 * i + 4 * slot, keep_first(load_f32x16(k + 4 * i), n - i), 64)
        store_f32x16(row + 4 * i, keep_first(load_f32x16(v + 4 * i), n - i))


def _register(kv, store):
    @kernel(f"rope_store_{kv}")
    def rope_store(inst, ctx, tid, n_threads):
        heads, kv_heads, n = parameter(inst, ROPE.heads), parameter(inst, ROPE.kv_heads), parameter(inst, ROPE.head_dim)
        group, stride, eps = div_i64(heads, kv_heads), parameter(inst, ROPE.table_stride), float_parameter(inst,
                                                                                                           ROPE.eps)
        rotary, apart, bits = parameter(inst, ROPE.rotary), parameter(inst, ROPE.apart), flags(inst)
        norm, units = bits & FLAG_HEAD_NORM, count(ctx, parameter(inst, ROPE.rows)) * kv_heads
        unit = claim(ctx)
        while unit < units:
            t = div_i64(unit, kv_heads)
            h = unit - t * kv_heads
            row = operand(inst, ctx, 0) + t * parameter(inst, ROPE.stride)
            table = operand(inst, ctx, 1) + token(ctx, t, TOKEN_POSITION) * stride
            for q in range(h * group, (h + 1) * group):
                if norm:
                    norm_head(row + 4 * n * q, operand(inst, ctx, 3), n, eps)
                rotate(row + 4 * n * q, table, rotary, apart, stride)
            if bits & FLAG_QUERIES == 0:
                k, v = row + 4 * n * (heads + h), row + 4 * n * (heads + kv_heads + h)
                if bits & FLAG_KEYS_AS_VALUES:
                    make_value(v, k, n, eps, bits & FLAG_VALUE_NORM)
                elif bits & FLAG_VALUE_NORM:
                    make_value(v, v, n, eps, True)
                if norm:
                    norm_head(k, operand(inst, ctx, 4), n, eps)
                rotate(k, table, rotary, apart, stride)
                slot = slot_of(ctx, t, parameter(inst, ROPE.recent))
                n_blocks, size = parameter(inst, ROPE.blocks), parameter(inst, ROPE.block_bytes)
                parts = block_parts(operand(inst, ctx, 2), kv_heads, n_blocks, size, h, slot >> 4)
                store(k, v, parts, slot & 15, n)
            unit = claim(ctx)
        return 0


for _kv, _store in (("int8", store_int8), ("f16", store_f16), ("f32", store_f32)):
    _register(_kv, _store)

