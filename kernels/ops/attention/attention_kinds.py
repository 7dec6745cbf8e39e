"""Differences between the stored types of K and V: scores of a block, weights of its rows of V, their sums.

The passes over a split (attention_split.py) are made of these; a further type of KV is a further row of KINDS.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...abi import ATTENTION_TILE, BLOCK_TOKENS, SPLIT_BLOCKS
from ...vector.accumulators import scale_add, start_s8
from ...vector.dot_chains import add_chains, dot_chains, sum_chains
from ...vector.instruction import inline
from ...vector.lanes import first_lane, max_lanes, splat_f32
from ...vector.memory import load_f32x16, prefetch, store_f32
from ...vector.scalars import div_f32, div_i64, max_f32
from ...vector.targets import fma_rows_f16, fma_rows_f32, fma_splat, load_f16x16
from ...vector.tiles import load_lines, zero_tile
from ...vector.weighted_sums import WEIGHT_MAX, add_weighted, scale_sums, store_weights, zero_sums
from .attention_rows import (
    SCORES,
    T_SCORES,
    T_WEIGHT,
    WEIGHT_BLOCKS,
    elements_at,
    offsets_at,
    prepare_float,
    prepare_int8,
)

IN_A_ROW = 64, 128
"""Lines that follow each other, as row tiles (simd.row_tile)."""

# -- scores of one block for a tile of r rows --------------------------------------------------------------------------


def _scores_int8(r, chains, ask_v):
    @inline
    def scores(queries, parts, ahead, padded):
        keys, values, scales = parts
        keys_ahead, scales_ahead = ahead
        ints = add_chains(chains, start_s8(1, r, offsets_at(queries, r)))
        for line in range(0, padded >> 2, chains):
            lines = load_lines(chains, keys + 64 * line, IN_A_ROW)
            ints = dot_chains(ints, lines, elements_at(queries, r) + 4 * r * line)
            for i in range(chains):
                ask_v(values + 64 * (line + i))
                prefetch(keys_ahead + 64 * (line + i))
        prefetch(scales_ahead)
        return scale_add(zero_tile(r), sum_chains(chains, ints), load_f16x16(scales), queries)

    return scores


def _scores_float(load, element):
    def make(r, chains, ask_v):
        @inline
        def scores(queries, parts, ahead, padded):
            keys, values, _scales = parts
            keys_ahead, _scales_ahead = ahead
            acc = zero_tile(r)
            for d in range(padded):
                acc = fma_splat(acc, load(keys + 16 * element * d), elements_at(queries, r) + 4 * r * d, 4)
                ask_v(values + 16 * element * d)
                prefetch(keys_ahead + 16 * element * d)
            return acc

        return scores

    return make


@inline
def _v_scales_int8(scales):
    """Scales of the 16 V rows."""
    return load_f16x16(scales + 2 * BLOCK_TOKENS)


@inline
def _v_scales_float(scales):
    """Float rows have none."""
    return splat_f32(1.0)


# -- weights of a split's rows of V, and their sums --------------------------------------------------------------------


@inline
def _round_weights(tile, i, row, first, last, largest):
    """int8 KV, where weights have 7 bits and one scale for a row and part, so that sums are exact, four products a
    lane.

    The scale is that of the largest weight. Positions that a row does not see have weight 0, so other rows of the tile
    do not matter; nor do they below, because integers add up the same in any order.
    """
    top = max_f32(max_lanes(largest), first_lane(splat_f32(1e-30)))
    scale = tile + T_WEIGHT + 4 * (ATTENTION_TILE * div_i64(first, WEIGHT_BLOCKS) + i)
    store_f32(scale, first_lane(splat_f32(top) * splat_f32(1.0 / WEIGHT_MAX)))
    inverse = splat_f32(div_f32(first_lane(splat_f32(1.0 * WEIGHT_MAX)), top))
    for b in range(first, last):
        store_weights(row + 16 * b, load_f32x16(row + 64 * b) * inverse)


@inline
def _keep_weights(tile, i, row, first, last, largest):
    """KV in floats, where weights stay as they are."""


def _sums_int8(r, n):
    size = n * r

    @inline
    def start():
        return zero_sums(size)

    @inline
    def add(acc, tile, b, values, ahead, k, padded):
        for line in range(4 * n):
            prefetch(ahead + 16 * k + 64 * line)
        return add_weighted(acc, r, values + 4 * k, 4 * padded, tile + T_SCORES + 16 * b, SCORES)

    @inline
    def end(acc, scales):
        return scale_sums(acc, r, scales)

    return start, add, end


def _sums_float(fma_rows, element):
    def make(r, n):
        size, lines = n * r, -(-16 * n * element // 64)

        @inline
        def start():
            return zero_tile(size)

        @inline
        def add(acc, tile, b, values, ahead, k, padded):
            p = tile + T_SCORES + 64 * b
            for j in range(BLOCK_TOKENS):
                at = (k + j * padded) * element
                acc = fma_rows(acc, r, values + at, p + 4 * j, SCORES)
                for line in range(lines):
                    prefetch(ahead + at + 64 * line)
            return acc

        @inline
        def end(acc, scales):
            return acc

        return start, add, end

    return make


class KvKind(NamedTuple):
    """Differences between the stored types of K and V."""

    prepare: Callable[[int], Any]
    """Makes the function that puts a row's query into a tile of r rows: (queries, i, q, n, scale)."""
    scores: Callable[[int, int, Any], Any]
    """Makes the scores of a block for r rows, in this many chains, and says how V is requested meanwhile."""
    v_scales: Any
    weigh: Any
    """Gives the weights of a part the form that the sums want."""
    part: int
    """Blocks of a part."""
    sums: Callable[[int, int], Any]
    """Makes the steps of weighted sums for r rows and n vectors of V: start of a part, a block, end of a part."""
    element: int
    """Bytes of an element."""


KINDS = {
    "int8": KvKind(prepare_int8, _scores_int8, _v_scales_int8, _round_weights, WEIGHT_BLOCKS,
                   _sums_int8, 1),
    "f16": KvKind(prepare_float, _scores_float(load_f16x16, 2), _v_scales_float, _keep_weights, SPLIT_BLOCKS,
                  _sums_float(fma_rows_f16, 2), 2),
    "f32": KvKind(prepare_float, _scores_float(load_f32x16, 4), _v_scales_float, _keep_weights, SPLIT_BLOCKS,
                  _sums_float(fma_rows_f32, 4), 4),
}
