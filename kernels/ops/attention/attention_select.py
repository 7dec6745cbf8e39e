"""Select the rows of V for each query head, from the scores that attention_scores left.

By share: rows whose weight is at least a share of the head's largest, over the whole context. By number: the N largest;
of equal ones the first. Both reduce to a score and a position: a row is selected if it scores more, or if it scores as
much and is not after the position. Bisection finds the N-th largest score among the floats; splits and blocks whose
largest score is less are skipped.

Operands: 5 rows of scores, into whose spare room the selection is written. Parameters: parameters.ATTENTION. Reference:
reference/attention/attention_select.py.
"""

from __future__ import annotations

from ...abi import FLAG_PRUNED, SPLIT_BLOCKS
from ...parameters import ATTENTION
from ...registry import kernel
from ...vector.instruction import claim, count, flags, float_parameter, inline, outlined, parameter
from ...vector.lanes import first_lane, lanes_above, lanes_at_least, splat_f32
from ...vector.memory import load_f32, load_f32x16, load_i32, store_f32, store_i32
from ...vector.scalars import count_ones, div_i64, f32_from_bits, max_f32, trailing_zeros
from ...vector.vecmath import exp_below
from .attention_paths import position_of
from .attention_rows import LOWEST, SPLIT_SHIFT, first_visible
from .attention_scores import first_scored, score_row, split_largest, split_sums

NEVER = LOWEST / 2
"""No score is so low but that of a row which is not there: LOWEST."""
C_LEAST, C_POSITION, C_LARGEST, C_SUM = 0, 4, 8, 12
"""Fields of a choice: the score, the position; of all splits the largest score and the sum of exponentials."""


@inline
def choice_at(inst, row):
    """Address of a choice."""
    return split_sums(inst, row, parameter(inst, ATTENTION.splits))


@inline
def all_wanted(choice):
    """Return whether the head needs every row that is there."""
    return load_f32(choice + C_LEAST) <= first_lane(splat_f32(NEVER))


@inline
def wanted(row, choice, b):
    """Bit i: the head needs row i of block b of the context."""
    scores, least = load_f32x16(row + 64 * b), load_f32(choice + C_LEAST)
    up_to = min(max(load_i32(choice + C_POSITION) + 1 - 16 * b, 0), 16)
    return lanes_at_least(scores, least) & (lanes_above(scores, splat_f32(least)) | ((1 << up_to) - 1))


@inline
def wanted_of_split(inst, row, choice, split):
    """Bit b: the head needs a row of block b of a split."""
    least = load_f32(choice + C_LEAST)
    if load_f32(split_sums(inst, row, split)) < least:
        return 0
    largest = load_f32x16(split_largest(inst, row, split))
    found = lanes_above(largest, splat_f32(least))
    rest = lanes_at_least(largest, least) & ~found
    while rest != 0:
        b = trailing_zeros(rest)
        rest &= rest - 1
        if wanted(row, choice, SPLIT_BLOCKS * split + b) != 0:
            found |= 1 << b
    return found


@outlined
def _count(inst, row, low, high, least):
    """Count the scores of the positions low .. high that are at least `least`, which is above the score of missing
    rows.
    """
    n, begin, end = 0, low >> SPLIT_SHIFT, (high >> SPLIT_SHIFT) + 1
    for eight in range(begin & -8, end, 8):  # pairs of a largest score and a sum
        splits = lanes_at_least(load_f32x16(split_sums(inst, row, eight)), least) & 0x5555
        splits &= -1 << 2 * max(begin - eight, 0)
        splits &= (1 << 2 * min(end - eight, 8)) - 1
        while splits != 0:
            split = eight + (trailing_zeros(splits) >> 1)
            splits &= splits - 1
            blocks = lanes_at_least(load_f32x16(split_largest(inst, row, split)), least)
            while blocks != 0:
                b = SPLIT_BLOCKS * split + trailing_zeros(blocks)
                blocks &= blocks - 1
                n += count_ones(lanes_at_least(load_f32x16(row + 64 * b), least))
    return n


@inline
def _has_at_most(inst, row, low, high, most, never):
    """Return whether no more than `most` of the positions low .. high are there."""
    return most > high - low or (flags(inst) & FLAG_PRUNED != 0 and _count(inst, row, low, high, never) <= most)


@outlined
def _position(row, low, high, score, n):
    """Position of the n-th that has this score."""
    value = splat_f32(score)
    for b in range(low >> 4, (high >> 4) + 1):
        scores = load_f32x16(row + 64 * b)
        equal = lanes_at_least(scores, score) & ~lanes_above(scores, value)
        if count_ones(equal) >= n:
            for _ in range(n - 1):
                equal &= equal - 1
            return 16 * b + trailing_zeros(equal)
        n -= count_ones(equal)
    return high


@inline
def _other(bits):
    """Bits of a float as a number that grows with the float, and back."""
    return bits if bits >= 0 else bits ^ 0x7FFFFFFF


@inline
def _float_of(number):
    return f32_from_bits(_other(number))


@outlined
def _largest(inst, row, low, high, m, most, choice):
    """The score and the position that the `most` largest scores of the positions low .. high have; there are more."""
    depth, least = first_lane(splat_f32(1.0)), m
    while depth < 1e29 and _count(inst, row, low, high, least) < most:
        least = m - depth
        depth = depth + depth
    store_f32(choice + C_LEAST, m)
    above = _other(load_i32(choice + C_LEAST)) + 1
    store_f32(choice + C_LEAST, least)
    number = _other(load_i32(choice + C_LEAST))
    found, more = _count(inst, row, low, high, least), 0
    while found > most and above - number > 1:
        middle = (number + above) >> 1
        n = _count(inst, row, low, high, _float_of(middle))
        if n < most:
            above, more = middle, n
        else:
            number, found = middle, n
    score, position = _float_of(number), high
    if found > most:
        position = _position(row, low, high, score, most - more)
    store_f32(choice + C_LEAST, score)
    store_i32(choice + C_POSITION, position)


@kernel("attention_select")
def attention_select(inst, ctx, tid, n_threads):
    """Choose for each (token, query head) of the forward pass's last tokens."""
    heads, most = parameter(inst, ATTENTION.heads), parameter(inst, ATTENTION.most)
    first, never = first_scored(inst, ctx), first_lane(splat_f32(NEVER))
    unit = claim(ctx)
    while unit < count(ctx, parameter(inst, ATTENTION.rows)) * heads:
        t = first + div_i64(unit, heads)
        row = score_row(inst, ctx, t, unit - (t - first) * heads)
        high, choice = position_of(ctx, t), choice_at(inst, row)
        low, m, total = first_visible(inst, high), never, splat_f32(0.0)
        begin, end = low >> SPLIT_SHIFT, (high >> SPLIT_SHIFT) + 1
        for split in range(begin, end):
            m = max_f32(load_f32(split_sums(inst, row, split)), m)  # stays where that is NaN
        for split in range(begin, end):
            sums = split_sums(inst, row, split)
            share = exp_below(splat_f32(load_f32(sums)) - splat_f32(m))
            total = total + splat_f32(load_f32(sums + 4)) * share
        if most == 0 or _has_at_most(inst, row, low, high, most, never):
            least = m + float_parameter(inst, ATTENTION.least) if most == 0 else never
            store_f32(choice + C_LEAST, max_f32(least, never))
            store_i32(choice + C_POSITION, high)
        else:
            _largest(inst, row, low, high, m, most, choice)
        store_f32(choice + C_LARGEST, m)
        store_f32(choice + C_SUM, first_lane(total))
        unit = claim(ctx)
    return 0
