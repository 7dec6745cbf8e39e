"""Masks of the neurons that a decoded token computes: those whose score is above their threshold.

`neuron_mask_scores` compares scores that other instructions have computed. `neuron_mask_signs` computes them:
hidden_size minus twice the number of positions at which the signs of x and of a gate row differ (SparseInfer, arXiv
2411.12692). abi.FLAG_MASK gives the layout of a mask; prompt tokens get none. A token's mask depends on its own row
alone.

Operands: 0 scores, or x as q8 rows; 1 thresholds; 2 masks; 3 scratch; 4 signs of the gates, in words of 64 columns.
Parameters: parameters.NEURON_MASK. Reference: reference/neuron_ffn/neuron_mask.py.
"""

from __future__ import annotations

from ...abi import ROLE_DECODE, TOKEN_ROLE
from ...parameters import NEURON_MASK
from ...registry import kernel
from ...vector.instruction import claim, count, inline, operand, outlined, parameter, token
from ...vector.lanes import differing_bits, lanes_above, splat_i32, sum_lanes_i32
from ...vector.memory import load_f32, load_f32x16, load_i32, load_i64, store_i64
from ...vector.scalars import count_ones, f32_of
from .neuron_parts import q8_block

WORDS = 8
"""Words of a mask that are claimed together."""


@outlined
def compare(scores, thresholds, out, first, stop, neurons):
    """Write words first .. stop of a mask: rows of scores and thresholds end with whole vectors."""
    for word in range(first, stop):
        bits, at = 0, 64 * word
        for k in range(min(4, (neurons - at + 15) >> 4)):
            lanes = lanes_above(load_f32x16(scores + 4 * (at + 16 * k)), load_f32x16(thresholds + 4 * (at + 16 * k)))
            bits |= lanes << (16 * k)
        store_i64(out + 8 * word, bits)


@kernel("neuron_mask_scores")
def from_scores(inst, ctx, tid, n_threads):
    """Compare scores with thresholds."""
    scores, thresholds, out = operand(inst, ctx, 0), operand(inst, ctx, 1), operand(inst, ctx, 2)
    neurons, tokens = parameter(inst, NEURON_MASK.neurons), count(ctx, parameter(inst, NEURON_MASK.rows))
    words, first = (neurons + 63) >> 6, claim(ctx) * WORDS
    while first < words:
        for t in range(tokens):
            if token(ctx, t, TOKEN_ROLE) == ROLE_DECODE:
                compare(scores + t * parameter(inst, NEURON_MASK.in_stride), thresholds,
                        out + t * parameter(inst, NEURON_MASK.out_stride), first, min(first + WORDS, words), neurons)
        first = claim(ctx) * WORDS
    return 0


@outlined
def signs_of(block, j, n, columns, to):
    """Write which values of token j in a q8 block of n are negative, bit c % 64 of word c // 64 for column c."""
    for word in range((columns + 63) >> 6):
        bits = 0
        for k in range(16):
            column = 64 * word + 4 * k
            if column < columns:  # values after the last column are 0
                four = load_i32(block + column * n + 4 * j)
                bits |= (four >> 7 & 1 | four >> 14 & 2 | four >> 21 & 4 | four >> 28 & 8) << (4 * k)
        store_i64(to + 8 * word, bits)


@inline
def differing(row, signs, words):
    """Count the columns in which two rows of signs differ."""
    whole, found = words & -8, 0
    if whole:
        acc = splat_i32(0)
        for word in range(0, whole, 8):
            acc = acc + differing_bits(row + 8 * word, signs + 8 * word)
        found = sum_lanes_i32(acc)
    for word in range(whole, words):
        found += count_ones(load_i64(row + 8 * word) ^ load_i64(signs + 8 * word))
    return found


@outlined
def agree(rows, signs, words, columns, thresholds, out, first, stop, neurons):
    """Write words first .. stop of a mask from the signs of gate rows and of x."""
    for word in range(first, stop):
        bits = 0
        for k in range(min(64, neurons - 64 * word)):
            neuron = 64 * word + k
            score = columns - 2 * differing(rows + 8 * words * neuron, signs, words)
            if f32_of(score) > load_f32(thresholds + 4 * neuron):
                bits |= 1 << k
        store_i64(out + 8 * word, bits)


@kernel("neuron_mask_signs")
def from_signs(inst, ctx, tid, n_threads):
    """Count agreeing signs and compare the counts with thresholds."""
    x, thresholds, out, rows = (operand(inst, ctx, 0), operand(inst, ctx, 1), operand(inst, ctx, 2),
                                operand(inst, ctx, 4))
    own = operand(inst, ctx, 3) + tid * parameter(inst, NEURON_MASK.scratch)
    neurons, columns = parameter(inst, NEURON_MASK.neurons), parameter(inst, NEURON_MASK.width)
    tokens, words = count(ctx, parameter(inst, NEURON_MASK.rows)), (columns + 63) >> 6
    n_words, first, laid_out = (neurons + 63) >> 6, claim(ctx) * WORDS, -1
    while first < n_words:
        for t in range(tokens):
            if token(ctx, t, TOKEN_ROLE) == ROLE_DECODE:
                if laid_out != t:
                    block, j, n = q8_block(x, parameter(inst, NEURON_MASK.in_stride), t, tokens)
                    signs_of(block, j, n, columns, own)
                    laid_out = t
                agree(rows, own, words, columns, thresholds, out + t * parameter(inst, NEURON_MASK.out_stride), first,
                      min(first + WORDS, n_words), neurons)
        first = claim(ctx) * WORDS
    return 0
