"""What this machine can do: streaming reads from memory, and int8 products from registers."""

from __future__ import annotations

from .blocks import store_block, zero_tile
from .common import claim, parameter, place
from .dots import dot_u8, scale_add, start_u4
from .registry import kernel
from .simd import (
    VI,
    I8x64,
    I32x16,
    define,
    load_line,
    splat_f32,
    splat_i32,
    store_i32,
    sum_lanes_i32,
)


@define(I32x16, I8x64)
def as_words(b, line):
    """A line as 16 integers."""
    return b.bitcast(line, VI)


@kernel("stream_read")
def stream_read(rec, ctx, tid, n_threads):
    """Read place 0 in chunks of parameter 0 bytes (a multiple of 256), parameter 1 of them, adding up what is read."""
    base, out, size, chunks = place(rec, ctx, 0), place(rec, ctx, 1), parameter(rec, 0), parameter(rec, 1)
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


@kernel("int8_peak")
def int8_peak(rec, ctx, tid, n_threads):
    """Parameter 0 rounds of 16 independent products of a line with 4 values: 16 * 128 operations a round.

    All 16 results are stored (1024 bytes a thread at place 1), else the compiler would leave products out.
    """
    base, out = place(rec, ctx, 0), place(rec, ctx, 1)
    line, rounds = load_line(base), parameter(rec, 0)
    ints = start_u4(1, 16, base)
    for _ in range(rounds):
        ints = dot_u8(ints, line, base)
    store_block(1, scale_add(zero_tile(16), ints, splat_f32(1.0), base), out + 1024 * tid, 64)
    return 0
