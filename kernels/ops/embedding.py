"""Embedding lookup: one row out of a tile16 table (a row is 1/16 of each line, or a tile by itself).

Operands: 0 table, 1 out. Parameters: parameters.ROWS. Reference: reference/embedding.py.
"""

from __future__ import annotations

from edgeinfer.quant import TYPES

from ..abi import TOKEN_ID
from ..parameters import ROWS
from ..registry import kernel
from ..vector.instruction import claim, count, inline, operand, parameter, token
from ..vector.memory import load_f32, load_i8, load_i32, load_u16, store_f32
from ..vector.packed import level_of
from ..vector.packed_formats import FORMS
from ..vector.scalars import f32_of
from ..vector.targets import f32_from_f16_bits


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
