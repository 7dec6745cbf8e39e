"""Rows of attention: (token, query head) pairs that share a KV head; their queries, sums and how splits are merged.

The tile in work, of up to ATTENTION_TILE rows, has its state in a thread's scratch: arrays by row, then scores, sums of
this split and merged sums, and a path. After it are the queries of all tiles of a unit of work, which serve one split
after the other. Those of a tile of r rows are: scales, offsets, (first, last) position that each row sees, slopes of
ALiBi, and the elements, interleaved by 4 bytes, row i at distance 4 i, so that they are at constant distances from each
other.
"""

from __future__ import annotations

from ...abi import ATTENTION_STATE, ATTENTION_TILE, BLOCK_TOKENS, FLAG_SINKS, KV_SCALES_BYTES, PATH_BLOCKS, SPLIT_BLOCKS
from ...parameters import ATTENTION
from ...vector.instruction import flags, inline, operand, outlined, parameter, round_up_16
from ...vector.lanes import (
    first_lane,
    keep_first,
    max_lanes,
    round_to_i32,
    splat_f32,
    splat_i32,
    sum_lanes,
    sum_lanes_i32,
    vabs,
    vmax,
)
from ...vector.memory import (
    load_f32,
    load_f32x16,
    load_i64,
    scatter_f32,
    scatter_i8x4,
    store_f32,
    store_f32x16,
    store_first,
    store_i32,
)
from ...vector.scalars import div_f32, max_f32
from ...vector.targets import fma
from ...vector.vecmath import exp_below

LOWEST = -1e30
"""Score of masked positions: finite, so that a row whose split is all masked stays a number, later weighted by 0."""
SPLIT_TOKENS = SPLIT_BLOCKS * BLOCK_TOKENS
SPLIT_SHIFT = SPLIT_TOKENS.bit_length() - 1
WEIGHT_BLOCKS = 4
"""Blocks whose weights have a scale in common, where V is int8."""

T_WEIGHT, T_M, T_MERGED_M = 0, 128, 192
"""Offsets of each row's scales of weights, part by part (WEIGHT_BLOCKS), and largest scores."""
T_UNIT, T_CHOSEN = 256, 264
"""attention_values: a unit of work, and which blocks of V it needs."""
T_TURNED = 272
"""Latent KV: of which block table and split the thread's scratch has V, then the first block and the one after."""
T_KEYS, T_VALUES, T_SCALES = 384, 384 + 8 * SPLIT_BLOCKS, 384 + 16 * SPLIT_BLOCKS
"""Addresses of K, V and scales of the split's blocks."""
T_L, T_MERGED_L = ATTENTION_STATE, ATTENTION_STATE + 64 * ATTENTION_TILE
T_SCORES = ATTENTION_STATE + 128 * ATTENTION_TILE
"""Rows of SPLIT_TOKENS floats."""
SCORES = 4 * SPLIT_TOKENS
"""Bytes of a row's scores of one split."""
LARGEST = 4 * SPLIT_BLOCKS
"""Bytes of the largest scores of its blocks."""


@inline
def acc_at(padded):
    """Offset of the sums over V of this split, a row after the other."""
    return T_SCORES + SCORES * ATTENTION_TILE


@inline
def merged_at(padded):
    """Offset of the merged sums."""
    return acc_at(padded) + 4 * ATTENTION_TILE * padded


@inline
def path_at(padded):
    """Offset of the blocks of a path."""
    return merged_at(padded) + 4 * ATTENTION_TILE * padded


@inline
def path_bytes(block_bytes):
    """Bytes of a block of a path: K, V and scales one after the other."""
    return 2 * block_bytes + KV_SCALES_BYTES


@inline
def key_width(inst):
    """Elements of a stored key, padding included; those of a value where these are stored, too."""
    return round_up_16(parameter(inst, ATTENTION.head_dim))


@inline
def value_dim(inst):
    """Elements of a value: a head's, or fewer where it is the beginning of a latent key."""
    values = parameter(inst, ATTENTION.values)
    return values if values else parameter(inst, ATTENTION.head_dim)


@inline
def queries_at(inst, padded, row):
    """Offset of the queries of the tile that begins with a row of the unit."""
    path = path_at(padded) + PATH_BLOCKS * path_bytes(parameter(inst, ATTENTION.block_bytes))
    return path + row * (32 + 4 * key_width(inst))


@inline
def offsets_at(queries, r):
    """Address of the offsets of a tile of r rows."""
    return queries + 4 * r


@inline
def bounds_at(queries, r, i):
    """Address of the first and the last position that row i of a tile of r sees."""
    return queries + 8 * r + 16 * i


@inline
def slopes_at(queries, r):
    """Address of the slopes of a tile of r rows, where the instruction has ALiBi."""
    return queries + 24 * r


@inline
def positions_seen(queries, r):
    """First and last position that any row of a tile of r rows sees, first and last that all of them see."""
    bounds = bounds_at(queries, r, 0)
    low, high = load_i64(bounds), load_i64(bounds + 8)
    all_from, all_to = low, high
    for i in range(1, r):
        first, last = load_i64(bounds + 16 * i), load_i64(bounds + 16 * i + 8)
        low, high, all_from, all_to = min(low, first), max(high, last), max(all_from, first), min(all_to, last)
    return low, high, all_from, all_to


@inline
def elements_at(queries, r):
    """Address of the elements of the queries of a tile of r rows."""
    return queries + 32 * r


@inline
def partial_bytes(padded):
    """One split's result of one row: m (64 bytes for alignment), l, acc."""
    return 128 + 4 * padded


# -- queries: interleaved by 4 bytes, row i of a tile of r at distance 4 i ---------------------------------------------


def prepare_int8(r):
    """Make ``prepare(queries, i, q, n, scale)`` for a tile of r rows."""

    @outlined
    def prepare(queries, i, q, n, scale):
        """Quantise with one scale (softmax's folded in); the offset (-8 x sum) undoes that of unsigned products."""
        largest = splat_f32(0.0)
        for k in range(0, n, 16):
            largest = vmax(largest, vabs(keep_first(load_f32x16(q + 4 * k), n - k)))
        top = max_lanes(largest)
        inverse = splat_f32(div_f32(first_lane(splat_f32(127.0)), max_f32(top, first_lane(splat_f32(1e-30)))))
        total = splat_i32(0)
        for k in range(0, n, 16):
            values = round_to_i32(keep_first(load_f32x16(q + 4 * k), n - k) * inverse)
            scatter_i8x4(elements_at(queries, r) + k * r + 4 * i, values, 4 * r)
            total = total + values
        store_f32(queries + 4 * i, first_lane(splat_f32(top) * splat_f32(1.0 / 127.0) * splat_f32(scale)))
        store_i32(offsets_at(queries, r) + 4 * i, -8 * sum_lanes_i32(total))

    return prepare


def prepare_float(r):
    """Make ``prepare(queries, i, q, n, scale)`` for a tile of r rows."""

    @outlined
    def prepare(queries, i, q, n, scale):
        """Scale a query."""
        for k in range(0, n, 16):
            values = keep_first(load_f32x16(q + 4 * k) * splat_f32(scale), n - k)
            scatter_f32(elements_at(queries, r) + 4 * k * r + 4 * i, values, 4 * r)

    return prepare


# -- rows: merge, finish -----------------------------------------------------------------------------------------------


@outlined
def clear_merged(tile, i, padded):
    """Start the merge of splits of row i."""
    store_f32(tile + T_MERGED_M + 4 * i, first_lane(splat_f32(LOWEST)))
    store_f32x16(tile + T_MERGED_L + 64 * i, splat_f32(0.0))
    for k in range(0, padded, 16):
        store_f32x16(tile + merged_at(padded) + 4 * (i * padded + k), splat_f32(0.0))


@inline
def start_merge(inst, ctx, tile, i, padded, head):
    """Start the merge of splits of row i, which is of a query head; its sink is a first split without V."""
    clear_merged(tile, i, padded)
    if flags(inst) & FLAG_SINKS:
        store_f32(tile + T_MERGED_M + 4 * i, load_f32(operand(inst, ctx, 8) + 4 * head))
        store_f32(tile + T_MERGED_L + 64 * i, first_lane(splat_f32(1.0)))


@outlined
def merge(tile, i, padded, m_at, l_at, sums):
    """Add one split's (m, l, acc) to the merged ones of row i (log-sum-exp)."""
    m, merged = load_f32(m_at), load_f32(tile + T_MERGED_M + 4 * i)
    new = max_f32(m, merged)
    old_share, share = exp_below(splat_f32(merged) - splat_f32(new)), exp_below(splat_f32(m) - splat_f32(new))
    store_f32(tile + T_MERGED_M + 4 * i, new)
    total = tile + T_MERGED_L + 64 * i
    store_f32x16(total, fma(load_f32x16(total), old_share, load_f32x16(l_at) * share))
    acc = tile + merged_at(padded) + 4 * i * padded
    for k in range(0, padded, 16):
        store_f32x16(acc + 4 * k, fma(load_f32x16(acc + 4 * k), old_share, load_f32x16(sums + 4 * k) * share))


@outlined
def finish(tile, i, padded, out, n):
    """out = merged acc / merged l of row i."""
    inverse = splat_f32(div_f32(first_lane(splat_f32(1.0)), sum_lanes(load_f32x16(tile + T_MERGED_L + 64 * i))))
    acc = tile + merged_at(padded) + 4 * i * padded
    for k in range(0, n, 16):
        store_first(out + 4 * k, load_f32x16(acc + 4 * k) * inverse, min(16, n - k))


@inline
def first_visible(inst, position):
    """First position in its path that the query at `position` sees."""
    window = parameter(inst, ATTENTION.window)
    return max(0, position - window + 1) if window else 0
