"""Attention of few tokens: units of work are (run of tokens of one sequence, KV head, split of the context).

They may be the last tokens of a forward pass over many: then their units, which are short, are claimed after those of
the others, so that all threads end at once.

All rows of a unit go through while its K and V are in this core's cache, so several draft tokens, or the branches of a
tree, read a context once. For a tree's tokens only the rows before the tree are read together; the splits after it go
token by token, each along its path.
"""

from __future__ import annotations

from ...abi import ATTENTION_ROWS, ATTENTION_TOKENS, COUNT_MERGE, COUNT_TOKENS, TOKEN_BASE, TOKEN_SEQUENCE
from ...parameters import ATTENTION
from ...vector.instruction import claim, count, inline, parameter, token
from ...vector.scalars import div_i64
from .attention_paths import has_path, position_of
from .attention_rows import SPLIT_SHIFT, first_visible

PIECES = 8
"""Pieces of consecutive units for each thread: it continues where it has read, as prefetchers expect."""
UNITS = 4
"""Units of work that each thread should find: a sequence's tokens are parted if there are fewer."""


@inline
def first_split(ctx):
    """The first of the tokens whose attention is computed in splits; after the last token if there are none."""
    return count(ctx, COUNT_TOKENS) - count(ctx, COUNT_MERGE)


@inline
def together(ctx, t, other):
    """Return whether rows of two tokens may share a tile: they are of one sequence, and both are of a tree or neither
    is."""
    same = token(ctx, t, TOKEN_SEQUENCE) == token(ctx, other, TOKEN_SEQUENCE)
    return same and has_path(ctx, t) == has_path(ctx, other)


@inline
def _run(inst, ctx, t, tokens, most, shift):
    """The run that begins with token t: (its end, the first split that any of its tokens sees, how many from there)."""
    position = position_of(ctx, t)
    lowest, highest, end = first_visible(inst, position), position, t + 1
    while end < tokens and end - t < most and together(ctx, t, end):
        position = position_of(ctx, end)
        lowest, highest = min(lowest, first_visible(inst, position)), max(highest, position)
        end += 1
    first = lowest >> shift
    return end, first, (highest >> shift) - first + 1


@inline
def _count_units(inst, ctx, begin, tokens, most, shift):
    """Units of work of some tokens, in runs of at most so many."""
    units, t = 0, begin
    while t < tokens:
        t, _first, splits = _run(inst, ctx, t, tokens, most, shift)
        units += parameter(inst, ATTENTION.kv_heads) * splits
    return units


@inline
def _most(inst, ctx, begin, tokens, group, large, n_threads, shift):
    """Most tokens of a run: as many as leave enough units for all threads, else those that fill a tile."""
    most, least = max(1, min(ATTENTION_TOKENS, div_i64(ATTENTION_ROWS, group))), max(1, div_i64(large, group))
    while most > least:
        if _count_units(inst, ctx, begin, tokens, most, shift) >= UNITS * n_threads:
            break
        most = max(least, most >> 1)
    return most


@inline
def _seek(inst, ctx, number, run, tokens, most, shift):
    """Continue to the run in which unit `number` is. A run is (token, end, first split, splits, number of its first
    unit).
    """
    t, end, first, splits, start = run
    kv_heads = parameter(inst, ATTENTION.kv_heads)
    while t < tokens and number >= start + kv_heads * splits:
        start += kv_heads * splits
        t = end
        if t < tokens:
            end, first, splits = _run(inst, ctx, t, tokens, most, shift)
    return t, end, first, splits, start


@inline
def _unit(number, run):
    """(first token, its end, KV head, split) of a unit: all splits of a head one after the other."""
    t, end, first, splits, start = run
    h = div_i64(number - start, splits)
    return t, end, h, first + number - start - h * splits


@inline
def _pieces(units, n_threads):
    """The claims of units: (units of a piece, number of pieces). After the last piece units are claimed one by one,
    while threads may still work on pieces.
    """
    piece = max(1, div_i64(units, PIECES * n_threads))
    return piece, max(0, div_i64(units - piece * (n_threads - 1), piece))


@inline
def _piece(number, pieces):
    """The first unit of a claim, and how many units it has."""
    piece, n = pieces
    if number < n:
        return number * piece, piece
    return n * piece + number - n, 1


@inline
def _alone(ctx, t, split):
    """Return whether a split has rows of a tree, which its tokens see one by one."""
    return has_path(ctx, t) and (split + 1) << SPLIT_SHIFT > token(ctx, t, TOKEN_BASE)


def few_tokens(large, small, many, some, one, runs=True, shift=SPLIT_SHIFT):
    """Attention of few tokens, split by split; the next split is claimed early, so that its K can be requested.

    Tokens go through one by one where not `runs`. Splits have ``1 << shift`` positions.
    """

    @inline
    def attend(inst, ctx, tile, unit, group, padded, fresh, ahead):
        """One split of a run, by tiles; the last tile asks for K of the unit that comes next, the others for their own.
        """
        t, end, h, split = unit
        alone, u = _alone(ctx, t, split), t
        while u < end:
            stop = u + 1 if alone else end
            last, row = (stop - u) * group - 1, 0
            while row <= last:
                slot = row if last < ATTENTION_ROWS else 0
                height = large if last - row >= small else small if last > row else 1
                next_unit = (end - 1, h, split) if stop < end or row + height <= last else ahead
                piece = (u, h, split)
                if height == large:
                    many(inst, ctx, tile, piece, slot, row, last, group, padded, fresh, next_unit)
                elif height == small:
                    some(inst, ctx, tile, piece, slot, row, last, group, padded, fresh, next_unit)
                else:
                    one(inst, ctx, tile, piece, slot, row, last, group, padded, fresh, next_unit)
                row += height
            u = stop

    @inline
    def decode(inst, ctx, tile, group, padded, n_threads, begin, tokens, claimed, before):
        """Tokens begin .. tokens, from the unit that was claimed on; `before` them there were others' units."""
        most = _most(inst, ctx, begin, tokens, group, large, n_threads, shift) if runs else 1
        pieces = _pieces(_count_units(inst, ctx, begin, tokens, most, shift), n_threads)
        number, left = _piece(claimed - before, pieces)
        end, first, splits = _run(inst, ctx, begin, tokens, most, shift)
        run = _seek(inst, ctx, number, (begin, end, first, splits, 0), tokens, most, shift)
        held_t, held_h = -1, -1
        while run[0] < tokens:
            following, rest = number + 1, left - 1
            if rest == 0:
                following, rest = _piece(claim(ctx) - before, pieces)
            after = _seek(inst, ctx, following, run, tokens, most, shift)
            unit = _unit(number, run)
            _t, end, h, split = _unit(following, after) if after[0] < tokens else unit
            alone = _alone(ctx, unit[0], unit[3])
            fresh = alone or held_t != unit[0] or held_h != unit[2] or group > ATTENTION_ROWS
            attend(inst, ctx, tile, unit, group, padded, fresh, (end - 1, h, split))
            held_t, held_h = -1 if alone else unit[0], unit[2]
            number, left, run = following, rest, after

    return decode
