"""An FFN stored neuron by neuron (layout neuron): f = act(x G^T) * (x U^T), then f D^T.

Only live neurons cost memory traffic: up rows and down columns are read where the gate's activation is not exactly 0.
With a list (FLAG_LIST) only its neurons are computed, and f is in the list's order.

One token: `neuron_gated_*` goes through blocks of neurons and computes each from gate to column while its bytes stream
in; a block leaves f and the sum of its columns, and `neuron_down_*` adds up these sums. More tokens: `neuron_gated_*`
computes f, `neuron_down_*` the sums, split by outputs among threads.

A row's sum is 16 lanes that grow line by line. An output is summed neuron by neuron within fixed blocks of neurons,
then block by block, and adding 0 changes nothing. So no bit depends on the number of tokens, on threads or on what was
skipped.

Places: gated: 0 weights, 1 x, 2 f, 3 list, 4 scratch, 5 bias (gates', then ups'), 6 sums of blocks. down: 0 weights,
1 f, 2 out, 3 list, 4 scratch, 5 bias, 6 sums of blocks. Parameters: parameters.NEURON_GATED, NEURON_DOWN. Twins:
reference/neuron.py.
"""

from __future__ import annotations

from .abi import (
    COUNT_ACTIVE,
    COUNT_MANY,
    FLAG_BIAS,
    FLAG_LIST,
    FLAG_OWN_INPUT,
    FLAG_RESIDUAL,
    NEURON_BATCH,
    NEURON_LINES,
    NEURON_TOKENS,
    NEURON_WINDOW,
    RECORD_BYTES,
)
from .common import claim, count, flags, inline, outlined, parameter, place
from .elementwise import own_input
from .lines import column_shape
from .neuron_parts import (
    fetch,
    line_count,
    line_format,
    make_add,
    make_as_lines,
    make_row_sums,
    multiply,
    number,
    q8_block,
    zero,
)
from .parameters import ACTIVATIONS, NEURON_DOWN, NEURON_GATED
from .registry import kernel
from .simd import (
    div_i64,
    f32_from_bits,
    load_f32,
    load_f32x16,
    load_i64,
    splat_f32,
    store_f32,
    store_f32x16,
    store_i64,
    sum_lanes,
)
from .vecmath import activate

TOKENS, ONE_PARTS, MANY_PARTS = column_shape()
MANY_CHUNKS = 16
"""Chunks that are claimed together where there are many tokens, because x is laid out as lines once a claim."""
RELU, RELU2 = ACTIVATIONS["relu"], ACTIVATIONS["relu2"]

# Scratch of gated: sums of rows, gates of a batch (16 floats a token), then of up to 16 live neurons their places,
# addresses of their columns, their values for all tokens; then what the number of lines gives the size of.
GATES = 64 * NEURON_TOKENS
LIVE = 2 * GATES
FOUND = LIVE + 16 * NEURON_BATCH
VALUES = FOUND + 16 * NEURON_BATCH
AREAS = VALUES + 8 * NEURON_BATCH * NEURON_TOKENS


@inline
def gated_areas(scratch, lines, x_bytes):
    """Addresses: x as lines, the scales of a row, factors of a batch of columns, the thread's own input row."""
    x, padded = scratch + AREAS, 16 * ((lines + 3) & -4)
    row = x + NEURON_TOKENS * lines * x_bytes
    return x, row, row + padded, row + (NEURON_BATCH + 1) * padded


@inline
def first_entry(rec, ctx, neuron, total):
    """Place of the first neuron that is not below `neuron`."""
    if flags(rec) & FLAG_LIST == 0:
        return min(neuron, total)
    low, high = 0, total
    while low < high:
        middle = (low + high) >> 1
        if number(rec, ctx, middle) < neuron:
            low = middle + 1
        else:
            high = middle
    return low


@inline
def entries(rec, ctx, neurons):
    """Neurons to compute: all, or those of the list."""
    return count(ctx, COUNT_ACTIVE) if flags(rec) & FLAG_LIST else neurons


@outlined
def activate_gates(gates, tokens, kind):
    """Apply the hidden activation to the gates of a batch."""
    for at in range(gates, gates + 64 * tokens, 64):
        store_f32x16(at, activate(load_f32x16(at), kind))


# -- gate, up and, for one token, down ---------------------------------------------------------------------------------


def _batch(dtype):
    """Steps on a batch of neurons for n tokens (1 or TOKENS), of which `present` are there."""
    one, many, x_bytes = make_row_sums(dtype, 1), make_row_sums(dtype, TOKENS), line_format(dtype)[2]

    @inline
    def row_sums(rec, w, x, ahead, row, sums, n):
        if n == 1:
            one(rec, w, x, ahead, row, sums)
        else:
            many(rec, w, x, ahead, row, sums)

    @inline
    def upcoming(rec, ctx, w, call, first, last):
        """Address of part `call` of the batch that begins at `first`: gate, up, column, gate, ... in one stream."""
        entry, part = first + call // 3, call % 3
        return w + (3 * number(rec, ctx, min(entry, last)) + part) * parameter(rec, NEURON_GATED.part_bytes)

    @outlined
    def gates(rec, ctx, w, scratch, lines, first, stop, last, eager, n):
        """Activated gates into scratch. What follows is fetched: a third of the next batch, or its gates alone."""
        x, row, _, _ = gated_areas(scratch, lines, x_bytes)
        size = 3 * parameter(rec, NEURON_GATED.part_bytes)
        for entry in range(first, stop):
            i = number(rec, ctx, entry)
            ahead = w + size * number(rec, ctx, min(entry + 2, last))
            if eager:
                ahead = upcoming(rec, ctx, w, entry - first, stop, last)
            row_sums(rec, w + size * i, x, ahead, row, scratch, n)
            for t in range(n):
                gate = sum_lanes(load_f32x16(scratch + 64 * t))
                if flags(rec) & FLAG_BIAS:
                    gate += load_f32(place(rec, ctx, 5) + 4 * i)
                store_f32(scratch + GATES + 4 * (16 * t + entry - first), gate)
        activate_gates(scratch + GATES, n, parameter(rec, NEURON_GATED.activation))

    @outlined
    def alive(rec, ctx, w, out, scratch, first, stop, present, waiting, n):
        """Append live neurons to those that wait, store the zeros of dead ones; returns how many wait now."""
        part = parameter(rec, NEURON_GATED.part_bytes)
        for entry in range(first, stop):
            live = 0
            for j in range(present):
                value = load_f32(scratch + GATES + 4 * (16 * j + entry - first))
                live |= value != 0
                store_f32(scratch + VALUES + 4 * (n * waiting + j), value)
                store_f32(out + j * parameter(rec, NEURON_GATED.out_stride) + 4 * entry, f32_from_bits(0))
            store_i64(scratch + LIVE + 8 * waiting, entry)
            store_i64(scratch + FOUND + 8 * waiting, w + (3 * number(rec, ctx, entry) + 2) * part)
            waiting += live
        return waiting

    @outlined
    def ups(rec, ctx, w, out, scratch, lines, stop, last, waiting, present, eager, n):
        """Values of waiting neurons, gates times ups, into f and scratch."""
        x, row, _, _ = gated_areas(scratch, lines, x_bytes)
        for k in range(waiting):
            entry = load_i64(scratch + LIVE + 8 * k)
            w_up = load_i64(scratch + FOUND + 8 * k) - parameter(rec, NEURON_GATED.part_bytes)
            ahead = w_up
            if eager:
                ahead = upcoming(rec, ctx, w, NEURON_BATCH + k, stop, last)
            row_sums(rec, w_up, x, ahead, row, scratch, n)
            for j in range(present):
                at = scratch + VALUES + 4 * (n * k + j)
                value = load_f32(at)
                if value != 0:
                    up = sum_lanes(load_f32x16(scratch + 64 * j))
                    if flags(rec) & FLAG_BIAS:
                        neuron = parameter(rec, NEURON_GATED.neurons) + number(rec, ctx, entry)
                        up += load_f32(place(rec, ctx, 5) + 4 * neuron)
                    store_f32(at, value * up)
                    store_f32(out + j * parameter(rec, NEURON_GATED.out_stride) + 4 * entry, value * up)

    return upcoming, gates, alive, ups


def _blocks(dtype, steps):
    """One token: blocks of neurons from gate to column."""
    columns, bits, x_bytes = line_format(dtype)
    upcoming, gates, alive, ups = steps
    add = make_add(dtype, 1, ONE_PARTS)

    @outlined
    def add_columns(rec, ctx, w, scratch, lines, sums, waiting, stop, last, eager):
        """Add the columns of waiting neurons to the block's sums; the last third of the next batch is fetched."""
        group, groups = parameter(rec, NEURON_GATED.group), parameter(rec, NEURON_GATED.groups)
        part, factors, size = parameter(rec, NEURON_GATED.part_bytes), gated_areas(scratch, lines, x_bytes)[2], \
            16 * ((lines + 3) & -4)
        multiply(groups, group * bits >> 7, groups * group * bits >> 3, scratch + FOUND, scratch + VALUES, waiting, 1,
                 0, lines, factors, size)
        step, at, call = (div_i64(NEURON_BATCH * part, lines) + 63) & -64, 0, 2 * NEURON_BATCH
        for line in range(lines):
            if eager:
                fetch(upcoming(rec, ctx, w, call, stop, last) + at, step)
                at += step
                if at >= part:
                    at, call = 0, call + 1
            add(group // 2, scratch + FOUND, waiting, line, factors + 16 * line, size, sums + 4 * columns * line, 0)

    @inline
    def shift(scratch, waiting):
        """Forget the first batch of those that wait."""
        for k in range(NEURON_BATCH, waiting):
            before = k - NEURON_BATCH
            store_i64(scratch + LIVE + 8 * before, load_i64(scratch + LIVE + 8 * k))
            store_i64(scratch + FOUND + 8 * before, load_i64(scratch + FOUND + 8 * k))
            store_f32(scratch + VALUES + 4 * before, load_f32(scratch + VALUES + 4 * k))
        return max(waiting - NEURON_BATCH, 0)

    @outlined
    def block(rec, ctx, w, out, scratch, lines, sums, first, end, last, eager):
        """Neurons first .. end of the list; those up to `last` come next. Returns whether many are alive."""
        kind, part, waiting = parameter(rec, NEURON_GATED.activation), parameter(rec, NEURON_GATED.part_bytes), 0
        always = (kind != RELU and kind != RELU2) or flags(rec) & FLAG_LIST != 0
        zero(sums, 4 * columns * lines)
        while first < end:
            stop = min(first + NEURON_BATCH, end)
            if eager:  # a short batch has fewer rows to fetch in
                for call in range(stop - first, NEURON_BATCH):
                    fetch(upcoming(rec, ctx, w, call, stop, last), part)
            gates(rec, ctx, w, scratch, lines, first, stop, last, eager, 1)
            before = waiting
            waiting = alive(rec, ctx, w, out, scratch, first, stop, 1, waiting, 1)
            if not eager:
                for k in range(before, waiting):
                    fetch(load_i64(scratch + FOUND + 8 * k) - part, 2 * part)
            first, live = stop, waiting - before
            while waiting >= NEURON_BATCH or (first >= end and waiting > 0):
                now = min(waiting, NEURON_BATCH)
                if eager:
                    for call in range(NEURON_BATCH + now, 2 * NEURON_BATCH):
                        fetch(upcoming(rec, ctx, w, call, stop, last), part)
                ups(rec, ctx, w, out, scratch, lines, stop, last, now, 1, eager, 1)
                add_columns(rec, ctx, w, scratch, lines, sums, now, stop, last, eager)
                waiting = shift(scratch, waiting)
            eager = always or 2 * live > NEURON_BATCH
        return eager

    return block


def _register_gated(dtype):
    columns, bits, x_bytes = line_format(dtype)
    steps = _batch(dtype)
    as_lines, block, (_, gates, alive, ups) = make_as_lines(dtype), _blocks(dtype, steps), steps

    @inline
    def single(rec, ctx, x, w, out, scratch, lines, total, n_threads):
        """All blocks of neurons for one token."""
        x_lines, _, _, own = gated_areas(scratch, lines, x_bytes)
        if flags(rec) & FLAG_OWN_INPUT and count(ctx, COUNT_MANY) == 0:
            x = own_input(rec - RECORD_BYTES, ctx, own)
        as_lines(rec, x, 0, 1, x_lines, x_bytes)
        height, neurons = parameter(rec, NEURON_GATED.block), parameter(rec, NEURON_GATED.neurons)
        kind, part = parameter(rec, NEURON_GATED.activation), parameter(rec, NEURON_GATED.part_bytes)
        span = 1  # blocks of a list are short: more of them are claimed at once
        if flags(rec) & FLAG_LIST:
            span = max(1, div_i64(neurons, 4 * n_threads * height))
        number_of_block = claim(ctx) * span
        while number_of_block * height < neurons:
            eager = (kind != RELU and kind != RELU2) or flags(rec) & FLAG_LIST != 0
            start = first_entry(rec, ctx, number_of_block * height, total)
            last = first_entry(rec, ctx, (number_of_block + span) * height, total) - 1
            for entry in range(start, min(start + (NEURON_BATCH if eager else 2), last + 1)):
                fetch(w + 3 * part * number(rec, ctx, entry), 3 * part if eager else part)
            for _ in range(span):
                if number_of_block * height < neurons:
                    number_of_block += 1
                    end = first_entry(rec, ctx, number_of_block * height, total)
                    sums = place(rec, ctx, 6) + 4 * columns * lines * (number_of_block - 1)
                    eager = block(rec, ctx, w, out, scratch, lines, sums, start, end, last, eager)
                    start = end
            number_of_block = claim(ctx) * span

    @inline
    def several(rec, ctx, x, w, out, scratch, lines, total, tokens, n_threads):
        """f of more tokens, TOKENS at a time."""
        chunk, x_lines = parameter(rec, NEURON_GATED.chunk), scratch + AREAS
        chunk = max(chunk, min(MANY_CHUNKS * chunk, div_i64(total, n_threads) + 1))
        start = claim(ctx) * chunk
        while start < total:
            end = min(start + chunk, total)
            for t in range(0, tokens, TOKENS):
                present, first = min(TOKENS, tokens - t), start
                for j in range(present):
                    q8, at, height = q8_block(rec, x, t + j, tokens)
                    as_lines(rec, q8, at, height, x_lines + j * x_bytes, TOKENS * x_bytes)
                here = out + t * parameter(rec, NEURON_GATED.out_stride)
                while first < end:
                    stop = min(first + NEURON_BATCH, end)
                    gates(rec, ctx, w, scratch, lines, first, stop, end - 1, False, TOKENS)
                    found = alive(rec, ctx, w, here, scratch, first, stop, present, 0, TOKENS)
                    ups(rec, ctx, w, here, scratch, lines, stop, end - 1, found, present, False, TOKENS)
                    first = stop
            start = claim(ctx) * chunk

    @kernel(f"neuron_gated_{dtype}")
    def run(rec, ctx, tid, n_threads):
        w, x, out = place(rec, ctx, 0), place(rec, ctx, 1), place(rec, ctx, 2)
        scratch = place(rec, ctx, 4) + tid * parameter(rec, NEURON_GATED.scratch)
        lines = line_count(parameter(rec, NEURON_GATED.groups), parameter(rec, NEURON_GATED.group), bits)
        tokens, total = count(ctx, parameter(rec, NEURON_GATED.rows)), \
            entries(rec, ctx, parameter(rec, NEURON_GATED.neurons))
        if tokens == 1:
            single(rec, ctx, x, w, out, scratch, lines, total, n_threads)
        else:
            several(rec, ctx, x, w, out, scratch, lines, total, tokens, n_threads)
        return 0


# -- down --------------------------------------------------------------------------------------------------------------


@outlined
def find(rec, ctx, f, found, values, first, end, present):
    """Neurons (places first .. end) with a value that is not 0: addresses of their columns, values of all TOKENS."""
    part, stride, n = parameter(rec, NEURON_DOWN.part_bytes), parameter(rec, NEURON_DOWN.x_stride), 0
    w = place(rec, ctx, 0) + 2 * part
    for entry in range(first, end):
        live = 0
        for j in range(TOKENS):
            value = load_f32(f + j * stride + 4 * entry) if j < present else f32_from_bits(0)
            store_f32(values + 4 * (TOKENS * n + j), value)
            live |= value != 0
        store_i64(found + 8 * n, w + 3 * part * number(rec, ctx, entry))
        n += live
    return n


@inline
def finish(rec, ctx, column, y, out):
    """Store 16 outputs from `column` on, with bias and residual."""
    if flags(rec) & FLAG_BIAS:
        y = load_f32x16(place(rec, ctx, 5) + 4 * column) + y
    if flags(rec) & FLAG_RESIDUAL:
        y = load_f32x16(out + 4 * column) + y
    store_f32x16(out + 4 * column, y)


def _outputs(dtype):
    """Lines first .. stop of all columns for the tokens t .. t + present."""
    columns, bits, _ = line_format(dtype)
    add = make_add(dtype, TOKENS, MANY_PARTS)

    @outlined
    def outputs(rec, ctx, sums, first, stop, t, present, total):
        group, groups = parameter(rec, NEURON_DOWN.group), parameter(rec, NEURON_DOWN.groups)
        stride, size = 4 * columns * (stop - first), 16 * NEURON_LINES
        totals = sums + 4 * NEURON_TOKENS * NEURON_LINES * 128
        factors = totals + 4 * NEURON_TOKENS * NEURON_LINES * 128
        found = factors + NEURON_BATCH * NEURON_TOKENS * size
        values = found + 8 * (NEURON_WINDOW + 1)
        zero(totals, TOKENS * stride)
        f, start = place(rec, ctx, 1) + t * parameter(rec, NEURON_DOWN.x_stride), 0
        neuron = 0
        while neuron < parameter(rec, NEURON_DOWN.neurons):
            neuron += parameter(rec, NEURON_DOWN.block)
            end = first_entry(rec, ctx, neuron, total)
            m = find(rec, ctx, f, found, values, start, end, present)
            zero(sums, TOKENS * stride)
            for begin in range(0, m, NEURON_BATCH):
                here, several = found + 8 * begin, min(NEURON_BATCH, m - begin)
                multiply(groups, group * bits >> 7, groups * group * bits >> 3, here, values + 4 * TOKENS * begin,
                         several, TOKENS, first, stop, factors, size)
                for line in range(first, stop):
                    at = line - first
                    add(group // 2, here, several, line, factors + 16 * at, size, sums + 4 * columns * at, stride)
            for at in range(0, TOKENS * stride, 64):
                store_f32x16(totals + at, load_f32x16(totals + at) + load_f32x16(sums + at))
            start = end
        for j in range(present):
            out = place(rec, ctx, 2) + (t + j) * parameter(rec, NEURON_DOWN.out_stride)
            for c in range(columns * first, min(columns * stop, parameter(rec, NEURON_DOWN.width)), 16):
                finish(rec, ctx, c, load_f32x16(totals + j * stride + 4 * (c - columns * first)), out)

    return outputs


def _register_down(dtype):
    columns, bits, _ = line_format(dtype)
    outputs = _outputs(dtype)

    @inline
    def merge(rec, ctx, lines, first, stop):
        """Add up the sums of blocks, for one token."""
        sums, stride = place(rec, ctx, 6), 4 * columns * lines
        blocks = div_i64(parameter(rec, NEURON_DOWN.neurons) + parameter(rec, NEURON_DOWN.block) - 1,
                         parameter(rec, NEURON_DOWN.block))
        for c in range(columns * first, min(columns * stop, parameter(rec, NEURON_DOWN.width)), 16):
            total, at = splat_f32(0.0), sums + 4 * c
            for _ in range(blocks):
                total = total + load_f32x16(at)
                at += stride
            finish(rec, ctx, c, total, place(rec, ctx, 2))

    @kernel(f"neuron_down_{dtype}")
    def run(rec, ctx, tid, n_threads):
        tokens, chunk = count(ctx, parameter(rec, NEURON_DOWN.rows)), max(2, parameter(rec, NEURON_DOWN.chunk) & -2)
        total = entries(rec, ctx, parameter(rec, NEURON_DOWN.neurons))
        lines = line_count(parameter(rec, NEURON_DOWN.groups), parameter(rec, NEURON_DOWN.group), bits)
        sums = place(rec, ctx, 4) + tid * parameter(rec, NEURON_DOWN.scratch)
        first = claim(ctx) * chunk
        while first < lines:
            stop = min(first + chunk, lines)
            if tokens == 1:
                merge(rec, ctx, lines, first, stop)
            else:
                for t in range(0, tokens, TOKENS):
                    outputs(rec, ctx, sums, first, stop, t, min(TOKENS, tokens - t), total)
            first = claim(ctx) * chunk
        return 0


for _dtype in ("q4", "int8"):
    _register_gated(_dtype)
    _register_down(_dtype)
