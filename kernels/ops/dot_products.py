"""Matmuls of row tiles in layout tile16 with quantised activations: the core of `linear` and `screen`. Dot products
themselves are in kernels/vector."""

from __future__ import annotations

from functools import cache, partial

from ..vector.accumulators import in_rows, scale_add, start_int8, zero_products, zero_sums
from ..vector.instruction import inline
from ..vector.int8_dot import dot_int8
from ..vector.memory import prefetch, stack_room
from ..vector.packed import dot_run, load_nested, minimum_add, paired_runs, start_of
from ..vector.packed_formats import FORMS, is_fine
from ..vector.pair_sums import add_sums, has_pair_sums, widen_pairs
from ..vector.scalars import opaque
from ..vector.small_groups import add_scaled, start_of_fine, store_offsets, unsigned_codes, zero_scaled
from ..vector.targets import load_scales
from ..vector.tiles import load_lines

AHEAD, AHEAD_OF_FOUR = 4608, 3456
"""Bytes between the weights in work and those asked for, of each row tile: of up to two at once, of four. The
hardware's prefetcher restarts at every page and lags behind. Four streams at 4608 would share the sets of the first
cache two by two, for that is more than a page: on Zen 5 they take 1.1 times as long as at 3456."""


@inline
def _leave(address, far, apart):
    return


@cache
def asking(m):
    """Return a function that prefetches the lines of m row tiles `far` bytes after an address."""

    @inline
    def ask(address, far, apart):
        for i in range(m):
            prefetch(address + far + (i & 1) * apart[0] + (i >> 1) * apart[1])

    return ask


def _asking_lines(ask, lines):
    """Return a function that prefetches as many lines from an address on."""
    if lines == 1:
        return ask

    @inline
    def ask_lines(address, far, apart):
        for line in range(lines):
            ask(address + 64 * line, far, apart)

    return ask_lines


@cache
def distance_of(record_bytes, m=1):
    """Return a function that computes a record's prefetch distance: into its row tile, at the end into the following.
    """
    ahead = AHEAD_OF_FOUR if m > 2 else AHEAD

    @inline
    def distance(left, records, following):
        return ahead if (left - 1) * record_bytes >= ahead else following - records * record_bytes + ahead

    return distance


def _finish(form, group, m):
    """Return a function that adds a part's sums to the accumulators: times scales, and minima times activation sums."""
    factors, minima, outer = form.factors_at(group), form.minima_at(group), form.outer_at(group)
    if is_fine(form):
        @inline
        def scale(acc, sums, w, part, apart, scales):
            return scale_add(acc, sums, load_scales(m, w + outer, apart), scales)
    elif form.nested:
        load = load_nested[form.scale]

        @inline
        def scale(acc, ints, w, part, apart, scales):
            return scale_add(acc, ints, load(m, w + factors + 16 * part, w + outer, apart), scales)

        @inline
        def add_minimum(acc, w, part, apart, scales, offsets):
            return minimum_add(acc, load(m, w + minima + 16 * part, w + outer + 32, apart), scales, offsets)
    else:
        @inline
        def scale(acc, ints, w, part, apart, scales):
            return scale_add(acc, ints, load_scales(m, w + factors + 32 * part, apart), scales)

        @inline
        def add_minimum(acc, w, part, apart, scales, offsets):
            return minimum_add(acc, load_scales(m, w + minima + 32 * part, apart), scales, offsets)

    @inline
    def finish(acc, ints, w, part, apart, scales, offsets):
        return scale(acc, ints, w, part, apart, scales)

    @inline
    def finish_with_minimum(acc, ints, w, part, apart, scales, offsets):
        return add_minimum(scale(acc, ints, w, part, apart, scales), w, part, apart, scales, offsets)

    return finish_with_minimum if form.minimum else finish


@cache
def _group_sums(name, group, m, n, ask):
    """Return a function that sums the products of a group, its lines from w on; activations advance 4 a step and token.
    """
    form, start, paired = FORMS[name], start_of(name), paired_runs(name, group)
    run_bytes, runs, values = 64 * form.run_lines, form.group_runs(group), 4 * form.run_steps * n
    group_bytes = 64 * form.group_lines(group)
    add_run, ask_run = dot_run(name, paired > 0), _asking_lines(ask, form.run_lines)

    @inline
    def sums(w, part, apart, x, offsets, far, inst):
        ints = start(m, n, offsets)
        for run in range(runs):
            at = w + group_bytes * part + run_bytes * run
            ask_run(at, far, apart)
            ints = add_run(ints, m, at, apart, x + values * run, inst)
        return ints

    @inline
    def sums_by_pairs(w, part, apart, x, offsets, far, inst):
        ints = zero_sums(m, n)
        for first in range(0, runs, paired):
            pairs = zero_sums(m, n)
            for run in range(first, first + opaque(paired)):
                at = w + group_bytes * part + run_bytes * run
                ask_run(at, far, apart)
                pairs = add_run(pairs, m, at, apart, x + values * run, inst)
            ints = widen_pairs(ints, pairs)
        return add_sums(ints, start(m, n, offsets))

    return sums_by_pairs if paired else sums


@cache
def _fine_sums(name, group, m, n, ask):
    """Return the `_group_sums` of both groups of a part, each a run, that are multiplied by scales of their own."""
    form, start, zero = FORMS[name], start_of_fine(name), zero_scaled()
    run_bytes, factors = 64 * form.run_lines, form.factors_at(group)
    add_run, ask_run = dot_run(name, has_pair_sums()), _asking_lines(ask, form.run_lines)

    @inline
    def add_group(total, w, number, apart, x, offsets, far, inst):
        at = w + run_bytes * number
        ask_run(at, far, apart)
        ints = add_run(start(m, n, x, offsets), m, at, apart, x, inst)
        return add_scaled(m, total, ints, w + factors + 16 * number, apart)

    @inline
    def sums(w, part, apart, x, offsets, far, inst):
        total = zero(m, n)
        for k in range(opaque(2)):
            total = add_group(total, w, 2 * part + k, apart, x + group * n * k, offsets + 4 * n * (part + k), far, inst)
        return total

    return sums


@cache
def _own_offsets(name, group, n):
    """Return a function that gives the address of a record's offsets, of which rows of activations have none for small
    groups. A single token needs none: it makes them group by group.
    """
    form = FORMS[name]
    if not (is_fine(form) and unsigned_codes() and n > 1):
        return _of_the_row
    store, groups = store_offsets(name, group), form.record_groups(group)

    @inline
    def own(x, offsets, room):
        store(n, groups, x, room)
        return opaque(room)

    return own


@inline
def _of_the_row(x, offsets, room):
    return offsets


def _all_parts(add_part, parts, values, n):
    """Return a function that adds all parts of an instruction, each with `values` bytes of activations; one token's in
    pairs.

    In a loop over single parts of four row tiles LLVM keeps an address for each row tile's codes, factors and
    prefetches, twice as many as there are registers; matmuls of one token then take 1.1 times as long from a cache.
    """
    @inline
    def one_by_one(acc, w, apart, x, scales, offsets, far, inst):
        for part in range(parts):
            acc = add_part(acc, w, part, apart, x, scales, offsets, far, inst)
            x += values
            scales += 4 * n
            offsets += 4 * n
        return acc

    @inline
    def two_by_two(acc, w, apart, x, scales, offsets, far, inst):
        for part in range(0, parts, 2):
            acc = add_part(acc, w, part, apart, x, scales, offsets, far, inst)
            acc = add_part(acc, w, part + 1, apart, x + values, scales + 4 * n, offsets + 4 * n, far, inst)
            x += 2 * values
            scales += 8 * n
            offsets += 8 * n
        return acc

    return two_by_two if n == 1 and parts % 2 == 0 else one_by_one


@cache
def matmul_packed(name, group, m, n, alone=False):
    """Matmul of m row tiles in a form with n tokens; `alone`: the next memory may not be wanted.

    Row tile i is (i & 1) * apart[0] + (i >> 1) * apart[1] bytes after w. Kernels that a process compiles one after the
    other share it.
    """
    form = FORMS[name]
    record, parts, values = form.record_bytes(group), form.parts(group), form.input_group(group) * n
    ask, distance, finish = _leave if alone else asking(m), distance_of(record, m), _finish(form, group, m)
    part_sums, factors = (_fine_sums if is_fine(form) else _group_sums)(name, group, m, n, ask), form.factors_at(group)
    ask_factors = _asking_lines(ask, (record - factors) // 64)

    @inline
    def add_part(acc, w, part, apart, x, scales, offsets, far, inst):
        ints = part_sums(w, part, apart, x, offsets, far, inst)
        return finish(acc, ints, w, part, apart, scales, offsets)

    add_parts, own = _all_parts(add_part, parts, values, n), _own_offsets(name, group, n)
    room_bytes = 4 * n * form.record_groups(group)

    @inline
    def matmul(w, apart, records, x, stride, scales, offsets, following, inst):
        acc, room = zero_products(m, n), stack_room(room_bytes)
        for r in range(records):
            far = distance(records - r, records, following)
            acc = add_parts(acc, w, apart, x, scales, own(x, offsets, room), far, inst)
            x += parts * values
            scales += 4 * n * parts
            offsets += 4 * n * parts
            ask_factors(w + factors, far, apart)
            w += record
        return in_rows(acc)

    return matmul


@cache
def matmul_int8(group, m, n, alone=False):
    """Do `matmul_packed` for weights of bytes."""
    lines, ask, distance = group // 4, _leave if alone else asking(m), distance_of(32 * group + 64, m)

    @inline
    def add_part(acc, w, part, apart, x, scales, offsets, far, inst):
        ints = start_int8(m, n, offsets)
        for pair in range(lines // 2):
            line = w + 64 * (part * lines + 2 * pair)
            ask(line, far, apart)
            ask(line + 64, far, apart)
            ints = dot_int8(ints, load_lines(m, line, apart), load_lines(m, line + 64, apart), x + 8 * n * pair)
        return scale_add(acc, ints, load_scales(m, w + 128 * lines + 32 * part, apart), scales)

    add_parts = _all_parts(add_part, 2, group * n, n)

    @inline
    def matmul(w, apart, records, x, stride, scales, offsets, following, inst):
        acc = zero_products(m, n)
        for r in range(records):
            far = distance(records - r, records, following)
            acc = add_parts(acc, w, apart, x, scales, offsets, far, inst)
            x += 2 * group * n
            scales += 8 * n
            offsets += 8 * n
            ask(w + 128 * lines, far, apart)
            w += 128 * lines + 64
        return in_rows(acc)

    return matmul


def matmul_of(name):
    """Return the maker of matmuls for a type of weights: a function of group, m, n and `alone`."""
    return partial(matmul_packed, name) if name in FORMS else matmul_int8
