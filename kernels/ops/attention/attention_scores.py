"""Attention scores without the sum over V, of the pass's last tokens; a count in memory says how many.

Each of these tokens has one row of scores per query head: a float for each position of the context, the largest score
of each block, the largest score and the sum of exponentials of each split, then space for the selection
(abi.score_row_bytes). With the largest scores of the blocks, a search for large scores reads few blocks. A position
inside a block that the token does not see has the score LOWEST, and so has the maximum of a block that it does not see
at all; the scores of such a block are not written. Pass 1 is that of attention, so the scores have the same bits. V is
not read; the K of the next split is prefetched meanwhile.

Operands: 0 qkv rows, 2 the layer's blocks, 3 scratch, 5 rows of scores, 6 as in attention.py. Parameters:
parameters.ATTENTION. The instruction is skipped where its count is 0. Reference:
reference/attention/attention_scores.py.
"""

from __future__ import annotations

from ...abi import COUNT_TOKENS
from ...parameters import ATTENTION
from ...registry import kernel
from ...vector.instruction import claim, count, inline, operand, outlined, parameter, round_up_16
from ...vector.lanes import max_lanes, splat_f32, sum_lanes, vmax
from ...vector.memory import load_f32x16, load_i64, store_f32, store_f32x16
from ...vector.scalars import div_i64
from ...vector.targets import attention_tiles
from ...vector.vecmath import exp_below
from .attention import single_step, start_step
from .attention_kinds import KINDS
from .attention_rows import LARGEST, LOWEST, SCORES, SPLIT_SHIFT, SPLIT_TOKENS, T_SCORES
from .attention_split import following, score_step
from .attention_units import few_tokens


@inline
def first_scored(inst, ctx):
    """The first of the tokens whose scores are wanted."""
    return count(ctx, COUNT_TOKENS) - count(ctx, parameter(inst, ATTENTION.rows))


@inline
def score_row(inst, ctx, t, head):
    """Address of the scores of a token and query head."""
    splits = parameter(inst, ATTENTION.splits)
    row = (t - first_scored(inst, ctx)) * parameter(inst, ATTENTION.heads) + head
    return operand(inst, ctx, 5) + row * ((splits * (SCORES + LARGEST + 8) + 16 + 63) & -64)


@inline
def split_sums(inst, row, split):
    """Address of the largest score and the sum of exponentials of a split."""
    return row + parameter(inst, ATTENTION.splits) * (SCORES + LARGEST) + 8 * split


@inline
def split_largest(inst, row, split):
    """Address of the largest scores of the blocks of a split."""
    return row + parameter(inst, ATTENTION.splits) * SCORES + LARGEST * split


@outlined
def _leave(inst, ctx, tile, i, bounds, t, head, split, padded):
    """Scores of row i in a split, the largest of each block and of all, and their sum."""
    start, low, high = split << SPLIT_SHIFT, load_i64(bounds), load_i64(bounds + 8)
    begin, end = max(low - start, 0) >> 4, (min(high - start, SPLIT_TOKENS - 1) >> 4) + 1
    scores, row = tile + T_SCORES + SCORES * i, score_row(inst, ctx, t, head)
    largest, top = split_largest(inst, row, split), load_f32x16(scores + 64 * begin)
    store_f32x16(largest, splat_f32(LOWEST))
    for b in range(begin, end):
        x = load_f32x16(scores + 64 * b)
        store_f32x16(row + SCORES * split + 64 * b, x)
        store_f32(largest + 4 * b, max_lanes(x))
        top = vmax(top, x)  # to load them all would wait for these stores
    m, total = max_lanes(top), splat_f32(0.0)
    for b in range(begin, end):
        total = total + exp_below(load_f32x16(scores + 64 * b) - splat_f32(m))
    sums = split_sums(inst, row, split)
    store_f32(sums, m)
    store_f32(sums + 4, sum_lanes(total))


def _tile_step(kind, r, chains):
    """Return the function for a tile of r rows in one split."""
    score = score_step(kind, r, chains, True)

    @outlined
    def step(inst, ctx, tile, queries, unit, seen, padded, ahead):
        score(inst, ctx, tile, queries, unit, seen, padded, following(inst, ctx, ahead))

    return single_step(r, start_step(kind, r), step, _leave)


def _register(kv, tiles):
    (large, *_), (small, *_), _one = tiles
    scored = few_tokens(large, small, *(_tile_step(KINDS[kv], r, chains) for r, _widths, chains in tiles))

    @kernel(f"attention_scores_{kv}")
    def attention_scores(inst, ctx, tid, n_threads):
        group = div_i64(parameter(inst, ATTENTION.heads), parameter(inst, ATTENTION.kv_heads))
        tile = operand(inst, ctx, 3) + tid * parameter(inst, ATTENTION.scratch)
        padded, end = round_up_16(parameter(inst, ATTENTION.head_dim)), count(ctx, COUNT_TOKENS)
        scored(inst, ctx, tile, group, padded, n_threads, first_scored(inst, ctx), end, claim(ctx), 0)
        return 0


for _kv in KINDS:
    _register(_kv, attention_tiles())
