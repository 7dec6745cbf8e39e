"""Operations on rows: embedding lookup, RMS norm, quantisation of activations, gathering of output rows.

Operands: 0 source, 1 out, 2 weight or order. Parameters: parameters.ROWS. Reference: reference/elementwise.py.
"""

from __future__ import annotations

from edgeinfer.quant import TYPES

from ..abi import CTX_OUTPUTS, FUSED_LEFT_OUT, FUSED_NORM, FUSED_ORDERED, TOKEN_ID
from ..parameters import ROWS
from ..registry import kernel
from ..vector.instruction import claim, count, float_parameter, inline, operand, outlined, parameter, token
from ..vector.lanes import (
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
from ..vector.memory import (
    load_f32,
    load_f32x16,
    load_i8,
    load_i32,
    load_i64,
    load_u16,
    scatter_i8x4,
    store_f32,
    store_f32x16,
    store_i32,
)
from ..vector.packed import level_of
from ..vector.packed_formats import FORMS
from ..vector.scalars import div_f32, div_i64, f32_of, max_f32, sqrt_f32
from ..vector.targets import f32_from_f16_bits, fma, token_tiles


def _blocks(heights):
    """Return functions that count the blocks of tokens (abi.token_blocks), find one by number, and find a token's.

    The latter two return its first token and its number of tokens; `first` is the first token of all.
    """
    if not heights:
        @inline
        def all_of(tokens):
            return tokens

        @inline
        def single(k, first, tokens):
            return first + k, 1

        return all_of, single, single
    n, (count_others, other, other_of) = heights[0], _blocks(heights[1:])

    @inline
    def count(tokens):
        return tokens // n + count_others(tokens % n)

    @inline
    def block(unit, first, tokens):
        whole = tokens // n
        if unit < whole:
            return first + unit * n, n
        return other(unit - whole, first + whole * n, tokens - whole * n)

    @inline
    def block_of(t, first, tokens):
        whole = tokens - tokens % n
        if t < whole:
            return first + t - t % n, n
        return other_of(t - whole, first + whole, tokens - whole)

    return count, block, block_of


n_blocks, block, block_of = _blocks(token_tiles())
"""A block belongs to one thread: its rows share cache lines."""


@inline
def quantise_row(x, base, j, n, width, group, padded, at_offsets):
    """Row j of a block of n that starts at `base`: floats to int8 with a scale and an offset (-8 x sum) per group.

    Rows of a block are interleaved (abi.token_blocks); x ends at its width, and `padded` values are stored.
    scale = max|x| / 127, q = nearest(x * 127 / max|x|): symmetric, so no zero point enters the products.
    """
    scales, offsets, start = base + n * padded + 4 * j, base + n * at_offsets + 4 * j, 0
    while start < padded:
        largest = splat_f32(0.0)
        for i in range(start, start + group, 16):
            if i < width:
                largest = vmax(largest, vabs(keep_first(load_f32x16(x + 4 * i), width - i)))
        top = max_lanes(largest)
        inverse = splat_f32(div_f32(first_lane(splat_f32(127.0)), max_f32(top, first_lane(splat_f32(1e-30)))))
        total = splat_i32(0)
        for i in range(start, start + group, 16):
            q = splat_i32(0)
            if i < width:
                q = round_to_i32(keep_first(load_f32x16(x + 4 * i), width - i) * inverse)
            scatter_i8x4(base + i * n + 4 * j, q, 4 * n)
            total = total + q
        store_f32(scales, first_lane(splat_f32(top) * splat_f32(1.0 / 127.0)))
        store_i32(offsets, -8 * sum_lanes_i32(total))
        scales += 4 * n
        offsets += 4 * n
        start += group


@inline
def in_order(x, order, out, width):
    """Element i of the row is element order[i] of x."""
    for i in range(width):
        store_f32(out + 4 * i, load_f32(x + 4 * load_i32(order + 4 * i)))


@inline
def without(x, columns, n, out, width):
    """The row with zeros in n columns."""
    for i in range(0, width, 16):
        store_f32x16(out + 4 * i, load_f32x16(x + 4 * i))
    for i in range(n):
        store_f32(out + 4 * load_i32(columns + 4 * i), f32_of(0))


@kernel("quantize")
def quantize(inst, ctx, tid, n_threads):
    """f32 rows, or each head of them, to q8 rows (int8 values, f32 scale and int32 offset per group), padded with 0.

    Elements may be taken in the order of operand 2, or be zeros where it says; operand 3 then holds a row of floats per
    thread.
    """
    x, out, rows = operand(inst, ctx, 0), operand(inst, ctx, 1), count(ctx, parameter(inst, ROWS.rows))
    width, heads, blocks = parameter(inst, ROWS.width), max(parameter(inst, ROWS.heads), 1), n_blocks(rows)
    unit = claim(ctx)
    while unit < blocks * heads:
        head = div_i64(unit, blocks)
        first, n = block(unit - head * blocks, 0, rows)
        base, start = out + head * parameter(inst, ROWS.head_out), x + 4 * head * width
        base += first * parameter(inst, ROWS.out_stride)
        for j in range(n):
            row = start + (first + j) * parameter(inst, ROWS.in_stride)
            if parameter(inst, ROWS.ordered):
                ordered = operand(inst, ctx, 3) + tid * parameter(inst, ROWS.scratch)
                in_order(row, operand(inst, ctx, 2), ordered, width)
                row = ordered
            if parameter(inst, ROWS.left_out):
                kept = operand(inst, ctx, 3) + tid * parameter(inst, ROWS.scratch)
                without(row, operand(inst, ctx, 2), parameter(inst, ROWS.left_out), kept, width)
                row = kept
            quantise_row(row, base, j, n, width, parameter(inst, ROWS.group), parameter(inst, ROWS.scales),
                         parameter(inst, ROWS.offsets))
        unit = claim(ctx)
    return 0


@inline
def norm_scale(x, width, eps):
    """1 / sqrt(mean(x^2) + eps) of `width` floats."""
    total = splat_f32(0.0)
    for i in range(0, width, 16):
        v = keep_first(load_f32x16(x + 4 * i), width - i)
        total = fma(v, v, total)
    mean = div_f32(sum_lanes(total), f32_of(width))
    return div_f32(first_lane(splat_f32(1.0)), sqrt_f32(mean + eps))


@inline
def normalise(x, weight, out, width, scale):
    """out = x * scale * weight for whole vectors; weights past `width` are stored as zeros, so the padding is 0."""
    for i in range(0, width, 16):
        v = keep_first(load_f32x16(x + 4 * i) * splat_f32(scale) * load_f32x16(weight + 4 * i), width - i)
        store_f32x16(out + 4 * i, v)


@kernel("rms_norm_f32")
def rms_norm_f32(inst, ctx, tid, n_threads):
    """RMS norm (arXiv 1910.07467, equation 4) of f32 rows."""
    x, out, weight = operand(inst, ctx, 0), operand(inst, ctx, 1), operand(inst, ctx, 2)
    width, rows = parameter(inst, ROWS.width), count(ctx, parameter(inst, ROWS.rows))
    t = claim(ctx)
    while t < rows:
        source = x + t * parameter(inst, ROWS.in_stride)
        normalise(source, weight, out + t * parameter(inst, ROWS.out_stride), width,
                  norm_scale(source, width, float_parameter(inst, ROWS.eps)))
        t = claim(ctx)
    return 0


@kernel("rms_norm_q8")
def rms_norm_q8(inst, ctx, tid, n_threads):
    """RMS norm of f32 rows, quantised on the way out; operand 3 holds a row of floats per thread."""
    x, out, weight = operand(inst, ctx, 0), operand(inst, ctx, 1), operand(inst, ctx, 2)
    width, rows = parameter(inst, ROWS.width), count(ctx, parameter(inst, ROWS.rows))
    row = operand(inst, ctx, 3) + tid * parameter(inst, ROWS.scratch)
    unit = claim(ctx)
    while unit < n_blocks(rows):
        first, n = block(unit, 0, rows)
        base = out + first * parameter(inst, ROWS.out_stride)
        for j in range(n):
            source = x + (first + j) * parameter(inst, ROWS.in_stride)
            normalise(source, weight, row, width, norm_scale(source, width, float_parameter(inst, ROWS.eps)))
            quantise_row(row, base, j, n, width, parameter(inst, ROWS.group), parameter(inst, ROWS.scales),
                         parameter(inst, ROWS.offsets))
        unit = claim(ctx)
    return 0


@outlined
def fused_input(source, weight, kind, width, group, scales, offsets, eps, left_out, row, scratch):
    """Do for one token what rms_norm_q8 (FUSED_NORM) or quantize does, into scratch; return the q8 row's address.

    `row` receives the normalised floats, those in the order that `weight` then is (FUSED_ORDERED), or those without the
    `left_out` columns that it names (FUSED_LEFT_OUT): after the q8 row.
    """
    if kind == FUSED_NORM:
        normalise(source, weight, row, width, norm_scale(source, width, eps))
        source = row
    if kind == FUSED_ORDERED:
        in_order(source, weight, row, width)
        source = row
    if kind == FUSED_LEFT_OUT:
        without(source, weight, left_out, row, width)
        source = row
    quantise_row(source, scratch, 0, 1, width, group, scales, offsets)
    return scratch


@kernel("gather_outputs")
def gather_outputs(inst, ctx, tid, n_threads):
    """Copy the rows whose logits are wanted (ctx: list of token numbers)."""
    x, out, rows = operand(inst, ctx, 0), operand(inst, ctx, 1), count(ctx, parameter(inst, ROWS.rows))
    chosen = load_i64(ctx + CTX_OUTPUTS)
    t = claim(ctx)
    while t < rows:
        source = x + load_i64(chosen + 8 * t) * parameter(inst, ROWS.in_stride)
        target = out + t * parameter(inst, ROWS.out_stride)
        for i in range(0, parameter(inst, ROWS.width), 16):
            store_f32x16(target + 4 * i, load_f32x16(source + 4 * i))
        t = claim(ctx)
    return 0


@kernel("gather_columns")
def gather_columns(inst, ctx, tid, n_threads):
    """Copy the elements of each row that operand 2 names; zeros follow up to a whole vector."""
    x, out, rows = operand(inst, ctx, 0), operand(inst, ctx, 1), count(ctx, parameter(inst, ROWS.rows))
    columns, width = operand(inst, ctx, 2), parameter(inst, ROWS.width)
    t = claim(ctx)
    while t < rows:
        target = out + t * parameter(inst, ROWS.out_stride)
        store_f32x16(target + 4 * (width - 1 & -16), splat_f32(0.0))
        in_order(x + t * parameter(inst, ROWS.in_stride), columns, target, width)
        t = claim(ctx)
    return 0


# -- embedding lookup: one row out of a tile16 table (a row is 1/16 of each line, or a tile by itself) -----------------


@inline
def four_columns(word, scale, out, k, width):
    """Store columns k .. k + 3, the bytes of `word` as int8 times the scale, as far as the row goes."""
    for j in range(min(4, width - k)):
        code = (word << (56 - 8 * j)) >> 56  # byte j, sign extended
        store_f32(out + 4 * (k + j), f32_of(code) * scale)


def _factors_of(form, group):
    """Return a function that reads a lane's scale, or minimum, of a group at its byte of an instruction, times the
    outer one.
    """
    if not form.nested:
        @inline
        def factor(tile, at, outer, part, lane):
            return f32_from_f16_bits(load_u16(tile + at + 32 * part + 2 * lane))
    else:
        mask = -1 if form.scale == "i8*f16" else 255

        @inline
        def factor(tile, at, outer, part, lane):
            inner = load_i8(tile + at + 16 * part + lane) & mask
            return f32_of(inner) * f32_from_f16_bits(load_u16(tile + outer + 2 * lane))

    return factor


def _store_packed(name, minimum):
    """Return a function that stores columns k .. k + 3, whose codes are the bytes of a word, up to the row's end."""
    level = level_of(name)

    @inline
    def store(word, scale, least, out, k, width, inst):
        for j in range(min(4, width - k)):
            store_f32(out + 4 * (k + j), f32_of(level((word >> 8 * j) & 255, inst)) * scale)

    @inline
    def store_with_minimum(word, scale, least, out, k, width, inst):
        for j in range(min(4, width - k)):
            store_f32(out + 4 * (k + j), f32_of(level((word >> 8 * j) & 255, inst)) * scale + least)

    return store_with_minimum if minimum else store


def _row_packed(name, group):
    form = FORMS[name]
    factor, store = _factors_of(form, group), _store_packed(name, form.minimum)
    low, steps, lines, minimum = form.planes[0], form.run_steps, form.first_lines, form.minimum
    more, rest, halvings, last = lines < form.run_lines, form.bits - low, 4 // low, 8 // low - 1
    factors, minima, outer = form.factors_at(group), form.minima_at(group), form.outer_at(group)
    groups, runs, run_bytes = form.record_groups(group), form.group_runs(group), 64 * form.run_lines
    record, lowest, further = form.record_bytes(group), ((1 << low) - 1) * 0x01010101, ((1 << rest) - 1) * 0x01010101

    @inline
    def row(tile, lane, out, width, inst):
        k = 0
        while k < width:
            for part in range(groups):
                scale, least = factor(tile, factors, outer, part, lane), f32_of(0)
                if minimum:
                    least = factor(tile, minima, outer + 32, part, lane)
                for run in range(runs):
                    at, high = tile + run_bytes * (part * runs + run) + 4 * lane, 0
                    if more:
                        high = load_i32(at + 64 * lines)
                    for step in range(steps):
                        word = (load_i32(at + 64 * (step >> halvings)) >> (low * (step & last))) & lowest
                        word += ((high >> (rest * step)) & further) << low
                        if k < width:
                            store(word, scale, least, out, k, width, inst)
                        k += 4
            tile += record

    return row


def _row_int8(group):
    @inline
    def row(tile, lane, out, width, inst):
        k = 0
        while k < width:
            for part in range(2):
                scale = f32_from_f16_bits(load_u16(tile + 32 * group + 32 * part + 2 * lane))
                for line in range(group // 4):
                    if k < width:
                        word = load_i32(tile + (part * (group // 4) + line) * 64 + 4 * lane)
                        four_columns(word, scale, out, k, width)
                    k += 4
            tile += 32 * group + 64

    return row


def _row_f16(group):
    @inline
    def row(tile, lane, out, width, inst):
        for k in range(width):
            store_f32(out + 4 * k, f32_from_f16_bits(load_u16(tile + 32 * k + 2 * lane)))

    return row


def _row_f32(group):
    @inline
    def row(tile, lane, out, width, inst):
        for k in range(width):
            store_f32(out + 4 * k, load_f32(tile + 64 * k + 4 * lane))

    return row


def _register_embed(name, row):
    @kernel(name)
    def embed(inst, ctx, tid, n_threads):
        table, out, rows = operand(inst, ctx, 0), operand(inst, ctx, 1), count(ctx, parameter(inst, ROWS.rows))
        t = claim(ctx)
        while t < rows:
            number, target = token(ctx, t, TOKEN_ID), out + t * parameter(inst, ROWS.out_stride)
            left, piece = parameter(inst, ROWS.width), parameter(inst, ROWS.piece)
            tile, lane = number >> 4, number & 15
            if piece > 0:
                tile, lane = number, 0
            else:
                piece = left
            while left > 0:
                row(table + tile * parameter(inst, ROWS.tile_bytes), lane, target, min(piece, left), inst)
                target, left, lane = target + 4 * piece, left - piece, lane + 1
            t = claim(ctx)
        return 0


for _name, _row in TYPES.items():
    for _end, _group in zip(_row.suffixes, _row.groups, strict=False):
        _register_embed(f"embed_{_end}", _row_packed(_name, _group) if _name in FORMS else _row_int8(_group))
_register_embed("embed_f16", _row_f16(0))
_register_embed("embed_f32", _row_f32(0))
