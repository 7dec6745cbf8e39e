"""Latent keys (MLA, arXiv 2405.04434): the norm of a token's latent, rotary embedding, and K in the layer's KV blocks.

A layer has one KV head. Its key is the latent, normed, and after it the rotated part that all heads share; V is the
latent and not stored. A row of queries has for each head the factor of the latent, which another instruction
writes, and after it the rotated part, which is copied here; after all heads comes the key. Blocks are as in rope.py,
without V; both halves of the scales of int8 are those of K.

Operands: 0 rows of queries, 1 rows with the queries' parts that turn, 2 rows with latent and the key's part, 3 table,
4 the layer's blocks, 5 weight of the norm. Parameters: parameters.LATENT. Reference:
reference/attention/store_latent.py.
"""

from __future__ import annotations

from ...abi import BLOCK_TOKENS, TOKEN_POSITION
from ...parameters import LATENT
from ...registry import kernel
from ...vector.instruction import claim, count, float_parameter, inline, operand, parameter, token
from ...vector.lanes import keep_first
from ...vector.memory import load_f32x16, scatter_f32, scatter_i8x4, store_first, store_i16
from ...vector.targets import scatter_f16
from ..elementwise import norm_scale, normalise
from ..rope import head_scale, inverse_of, quantised, rotate, slot_of
from .attention_paths import latent_parts


@inline
def _turned(source, target, table, n, table_stride):
    """Copy n elements and rotate them."""
    for i in range(0, n, 16):
        store_first(target + 4 * i, load_f32x16(source + 4 * i), min(16, n - i))
    rotate(target, table, n, n >> 1, table_stride)


@inline
def _store_int8(k, keys, scales, slot, n):
    bits = head_scale(k, n)
    store_i16(scales + 2 * slot, bits)
    store_i16(scales + 2 * BLOCK_TOKENS + 2 * slot, bits)
    inverse = inverse_of(bits)
    for i in range(0, n, 16):
        scatter_i8x4(keys + 16 * i + 4 * slot, quantised(k, i, n, inverse), 64)


@inline
def _store_f16(k, keys, scales, slot, n):
    for i in range(0, n, 16):
        scatter_f16(keys + 32 * i + 2 * slot, keep_first(load_f32x16(k + 4 * i), n - i), 32)


@inline
def _store_f32(k, keys, scales, slot, n):
    for i in range(0, n, 16):
        scatter_f32(keys + 64 * i + 4 * slot, keep_first(load_f32x16(k + 4 * i), n - i), 64)


def _register(kv, store):
    @kernel(f"store_latent_{kv}")
    def store_latent(inst, ctx, tid, n_threads):
        heads, rank, rotary = parameter(inst, LATENT.heads), parameter(inst, LATENT.rank), parameter(inst,
                                                                                                     LATENT.rotary)
        n, stride, eps = rank + rotary, parameter(inst, LATENT.table_stride), float_parameter(inst, LATENT.eps)
        t, tokens = claim(ctx), count(ctx, parameter(inst, LATENT.rows))
        while t < tokens:
            row = operand(inst, ctx, 0) + t * parameter(inst, LATENT.stride)
            q = operand(inst, ctx, 1) + t * parameter(inst, LATENT.q_stride) + 4 * parameter(inst, LATENT.q_first)
            latent = operand(inst, ctx, 2) + t * parameter(inst, LATENT.c_stride) + 4 * parameter(inst, LATENT.c_first)
            table = operand(inst, ctx, 3)
            if parameter(inst, LATENT.still) == 0:
                table += token(ctx, t, TOKEN_POSITION) * stride
            for head in range(heads):
                _turned(q + 4 * rotary * head, row + 4 * (n * head + rank), table, rotary, stride)
            k = row + 4 * n * heads
            normalise(latent, operand(inst, ctx, 5), k, rank, norm_scale(latent, rank, eps))
            _turned(latent + 4 * rank, k + 4 * rank, table, rotary, stride)
            slot = slot_of(ctx, t, parameter(inst, LATENT.recent))
            keys, _values, scales = latent_parts(operand(inst, ctx, 4), parameter(inst, LATENT.blocks),
                                                 parameter(inst, LATENT.block_bytes), slot >> 4)
            store(k, keys, scales, slot & 15, n)
            t = claim(ctx)
        return 0


for _kv, _store in (("int8", _store_int8), ("f16", _store_f16), ("f32", _store_f32)):
    _register(_kv, _store)
