"""Limits of this machine: reads from memory, in order and scattered, and products from registers."""

from __future__ import annotations

from numba.extending import intrinsic

from ..isa import INT8_CHAINS
from ..registry import kernel
from ..vector.accumulators import scale_add, start_u4
from ..vector.instruction import claim, operand, parameter
from ..vector.int8_dot import dot_u8
from ..vector.lanes import splat_f32, splat_i32, sum_lanes_i32
from ..vector.memory import load_f32, load_i32, load_line, prefetch, store_i32
from ..vector.simd import VI, F32x16, I8x64, I32x16, Tile, define, per_row
from ..vector.targets import emit_fma, f32_chains, fma_rows_f32
from ..vector.tiles import store_block, store_tile, zero_tile

CHAINS = f32_chains()


@define(I32x16, I8x64)
def as_words(b, line):
    """A line as 16 integers."""
    return b.bitcast(line, VI)


@intrinsic
def fma_all(context, tile, x, y):
    """tile[i] * x + y."""
    if not isinstance(tile, Tile) or x != F32x16 or y != F32x16:
        return None

    def lower(context, b, sig, args):
        return per_row(b, tile, args[0], lambda b, v, i: emit_fma(b, v, args[1], args[2]))

    return tile(tile, x, y), lower


@kernel("stream_read")
def stream_read(inst, ctx, tid, n_threads):
    """Read operand 0 in chunks of parameter 0 bytes (a multiple of 256), parameter 1 of them, adding up what is
    read."""
    base, out, size, chunks = operand(inst, ctx, 0), operand(inst, ctx, 1), parameter(inst, 0), parameter(inst, 1)
    a, b, c, d = splat_i32(0), splat_i32(0), splat_i32(0), splat_i32(0)
    chunk = claim(ctx)
    while chunk < chunks:
        start = base + chunk * size
        for at in range(start, start + size, 256):
            a = a + as_words(load_line(at))
            b = b + as_words(load_line(at + 64))
            c = c + as_words(load_line(at + 128))
            d = d + as_words(load_line(at + 192))
        chunk = claim(ctx)
    store_i32(out + 64 * tid, sum_lanes_i32(a + b + c + d))
    return 0


@kernel("random_read")
def random_read(inst, ctx, tid, n_threads):
    """Read the pieces of operand 0 that a list names, as sparse kernels read rows, adding up what is read.

    Operand 1 holds int32 numbers of pieces; operand 2 gets the sums. Parameters: bytes of a piece (a multiple of 64),
    pieces that a thread takes at a time, how often that is in all, by how many pieces to look ahead in the list (it
    continues that far), how many bytes of that piece to prefetch.
    """
    base, names, out = operand(inst, ctx, 0), operand(inst, ctx, 1), operand(inst, ctx, 2)
    size, batch, batches = parameter(inst, 0), 4 * parameter(inst, 1), parameter(inst, 2)
    ahead, head = 4 * parameter(inst, 3), parameter(inst, 4)
    a, b, c, d = splat_i32(0), splat_i32(0), splat_i32(0), splat_i32(0)
    chunk = claim(ctx)
    while chunk < batches:
        for name in range(names + chunk * batch, names + (chunk + 1) * batch, 4):
            soon = base + size * load_i32(name + ahead)
            for at in range(soon, soon + head, 64):
                prefetch(at)
            start = base + size * load_i32(name)
            middle = start + (size & -256)
            for at in range(start, middle, 256):
                a = a + as_words(load_line(at))
                b = b + as_words(load_line(at + 64))
                c = c + as_words(load_line(at + 128))
                d = d + as_words(load_line(at + 192))
            for at in range(middle, start + size, 64):
                a = a + as_words(load_line(at))
        chunk = claim(ctx)
    store_i32(out + 64 * tid, sum_lanes_i32(a + b + c + d))
    return 0


@kernel("int8_peak")
def int8_peak(inst, ctx, tid, n_threads):
    """Parameter 0 rounds of INT8_CHAINS independent products of a line with 4 values (Isa.round_operations).

    All results are stored (1024 bytes a thread at operand 1), else the compiler would leave products out.
    """
    base, out = operand(inst, ctx, 0), operand(inst, ctx, 1)
    line, rounds = load_line(base), parameter(inst, 0)
    ints = start_u4(1, INT8_CHAINS, base)
    for _ in range(rounds):
        ints = dot_u8(ints, line, base)
    store_block(1, scale_add(zero_tile(INT8_CHAINS), ints, splat_f32(1.0), base), out + 1024 * tid, 64)
    return 0


@kernel("f32_peak")
def f32_peak(inst, ctx, tid, n_threads):
    """Parameter 0 rounds of v = v * x + y on CHAINS vectors v of 16 (Isa.round_operations).

    Operand 0 holds x, y, 1 and, from byte 64 on, 12 vectors. The results are stored (1024 bytes a thread at operand 1).
    """
    base, out = operand(inst, ctx, 0), operand(inst, ctx, 1)
    x, y, rounds = splat_f32(load_f32(base)), splat_f32(load_f32(base + 4)), parameter(inst, 0)
    vectors = fma_rows_f32(zero_tile(CHAINS), 1, base + 64, base + 8, 0)
    for _ in range(rounds):
        vectors = fma_all(vectors, x, y)
    store_tile(vectors, out + 1024 * tid, 64)
    return 0
