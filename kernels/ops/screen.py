"""Output head with estimates of all logits: tiles that cannot hold the largest logit keep their estimates.

An estimate is off by at most bound x reach, the bound of its row of the head and the reach of the input, which are the
norms of two vectors (sparse/head.py computes the one, `reach` the other). `screen_maxima` finds the largest estimates
of chunks. `screen_least` computes the tile of the largest one exactly: a logit must be able to reach the largest logit
of that tile. `head_*` computes the tiles of 16 rows in which one can, and copies the estimates of the others. So the
largest logit is always that of the whole head, and has its bits.

This applies to rows of decoded tokens whose sample spec allows it (abi.SAMPLE_SCREEN), each by itself; for all others
every logit is computed.

Operands: 0 weights, 1 x, 2 out, 3 estimates, 4 bounds, 5 work, 6 low (the input as the estimates' factors have it, in
f32), 7 scratch. Parameters: parameters.SCREEN. Reference: reference/screen.py.
"""

from __future__ import annotations

from typing import NamedTuple

from edgeinfer.quant import TYPES

from ..abi import (
    COUNT_SAMPLES,
    CTX_OUTPUTS,
    ROLE_DECODE,
    SAMPLE_CHUNK,
    SAMPLE_MASK,
    SAMPLE_SCREEN,
    SCREEN_LEAST,
    SCREEN_MAXIMA,
    SCREEN_REACH,
    SCREEN_ROUNDING,
    TOKEN_ROLE,
)
from ..parameters import SCREEN
from ..registry import kernel
from ..vector.instruction import claim, count, inline, operand, parameter, token
from ..vector.lanes import (
    first_lane,
    keep_first,
    lane_numbers,
    lanes_above,
    mask_outside,
    max_lanes,
    splat_f32,
    sum_lanes,
    vabs,
    vmax,
)
from ..vector.memory import load_f32, load_f32x16, load_i64, store_f32, store_f32x16
from ..vector.scalars import div_i64, f32_from_bits, sqrt_f32
from ..vector.targets import fma, token_tiles
from ..vector.tiles import store_block
from .dot_products import matmul_of
from .matmul import Addresses, chunk_of_rows, in_blocks, in_chunks, of_heights
from .neuron_ffn.neuron_parts import q8_block
from .sampling.sample import sample_spec_of

_INFINITY = float("inf")
_ROUNDED = 32 * (1.01 * SCREEN_ROUNDING / 254) ** 2
"""Bound of the weighed squared error of 32 values rounded to int8, as a multiple of the square of the largest."""
_ALL = 0xFFFF


@inline
def screened(ctx, r):
    """Return whether estimates are enough for row r."""
    spec = sample_spec_of(ctx, r)
    if spec == 0 or load_i64(spec + SAMPLE_MASK) != 0:
        return False
    last = load_i64(load_i64(ctx + CTX_OUTPUTS) + 8 * r)
    return load_i64(spec + SAMPLE_SCREEN) != 0 and token(ctx, last, TOKEN_ROLE) == ROLE_DECODE


@inline
def inside(v, i, vocab_size):
    """The lanes of v, from number i on, that are logits; -inf after the last one."""
    if i + 16 <= vocab_size:
        return v
    return mask_outside(v, lane_numbers(), 0, vocab_size - 1 - i, f32_from_bits(0xFF800000))


@kernel("screen_maxima")
def screen_maxima(inst, ctx, tid, n_threads):
    """The largest estimate of each chunk."""
    vocab_size, rows = parameter(inst, SCREEN.vocab_size), count(ctx, COUNT_SAMPLES)
    chunks = div_i64(vocab_size + SAMPLE_CHUNK - 1, SAMPLE_CHUNK)
    unit = claim(ctx)
    while unit < rows * chunks:
        r = div_i64(unit, chunks)
        chunk = unit - r * chunks
        if screened(ctx, r):
            estimates = operand(inst, ctx, 3) + r * parameter(inst, SCREEN.out_stride)
            top, first = splat_f32(-_INFINITY), chunk * SAMPLE_CHUNK
            for i in range(first, min(first + SAMPLE_CHUNK, vocab_size), 16):
                top = vmax(top, inside(load_f32x16(estimates + 4 * i), i, vocab_size))
            store_f32(operand(inst, ctx, 5) + r * parameter(inst, SCREEN.work_stride) + SCREEN_MAXIMA + 4 * chunk,
                      max_lanes(top))
        unit = claim(ctx)
    return 0


@inline
def best_tile(estimates, maxima, vocab_size):
    """The first tile that holds the largest estimate."""
    best, chosen = load_f32(maxima), 0
    for chunk in range(1, div_i64(vocab_size + SAMPLE_CHUNK - 1, SAMPLE_CHUNK)):
        top = load_f32(maxima + 4 * chunk)
        if top > best:
            best, chosen = top, chunk
    first = chosen * SAMPLE_CHUNK
    for i in range(first, min(first + SAMPLE_CHUNK, vocab_size), 16):
        if max_lanes(inside(load_f32x16(estimates + 4 * i), i, vocab_size)) == best:
            return i >> 4
    return first >> 4  # where one is NaN


@inline
def reach(low, width, rank):
    """Return the factor of all bounds: the norm of 1, of low, and of the largest rounding errors of its first values.

    It is a thousandth too large, so that the sum in f32 is above the sum in real numbers.
    """
    total, errors = splat_f32(0.0), splat_f32(0.0)
    for i in range(0, width, 16):
        v = keep_first(load_f32x16(low + 4 * i), width - i)
        total = fma(v, v, total)
    for start in range(0, rank, 32):
        largest = splat_f32(0.0)
        for i in range(start, min(start + 32, rank), 16):
            largest = vmax(largest, vabs(keep_first(load_f32x16(low + 4 * i), rank - i)))
        top = splat_f32(max_lanes(largest))
        errors = errors + top * top * splat_f32(_ROUNDED)
    squares = splat_f32(sum_lanes(total)) + errors + splat_f32(1.0)
    return first_lane(splat_f32(sqrt_f32(first_lane(squares))) * splat_f32(1.001))


def _alone(make_matmul, group, n):
    """Return a function that leaves a tile's logits of a block of n tokens in scratch, 64 bytes a token."""
    matmul = make_matmul(group, 1, n, alone=True)

    @inline
    def compute(inst, w, base, tile, scratch):
        size = parameter(inst, SCREEN.tile_bytes)
        acc = matmul(w + tile * size, (0, 0), parameter(inst, SCREEN.records), base, parameter(inst, SCREEN.x_stride),
                      base + n * parameter(inst, SCREEN.x_scales), base + n * parameter(inst, SCREEN.x_offsets), 0,
                      inst)
        store_block(1, acc, scratch, 64)

    return compute


def _of_block(steps, single):
    """Run the function of this many tokens: of pairs of tokens and functions, or the one of a single token."""
    if not steps:
        @inline
        def alone(n, inst, w, base, tile, scratch):
            single(inst, w, base, tile, scratch)

        return alone
    (height, compute), other = steps[0], _of_block(steps[1:], single)

    @inline
    def run(n, inst, w, base, tile, scratch):
        if n == height:
            compute(inst, w, base, tile, scratch)
        else:
            other(n, inst, w, base, tile, scratch)

    return run


def _register_least(name, make_matmul, group):
    of_block = _of_block([(n, _alone(make_matmul, group, n)) for n in token_tiles()], _alone(make_matmul, group, 1))

    @inline
    def exact(inst, w, x, r, tokens, tile, scratch):
        """The logits of a tile for row r."""
        base, j, n = q8_block(x, parameter(inst, SCREEN.x_stride), r, tokens)
        of_block(n, inst, w, base, tile, scratch)
        return load_f32x16(scratch + 64 * j)

    @kernel(name)
    def run(inst, ctx, tid, n_threads):
        scratch = operand(inst, ctx, 7) + tid * parameter(inst, SCREEN.scratch)
        vocab_size, tokens = parameter(inst, SCREEN.vocab_size), count(ctx, parameter(inst, SCREEN.rows))
        r = claim(ctx)
        while r < count(ctx, COUNT_SAMPLES):
            work = operand(inst, ctx, 5) + r * parameter(inst, SCREEN.work_stride)
            least, far = first_lane(splat_f32(-_INFINITY)), first_lane(splat_f32(0.0))
            if screened(ctx, r):
                estimates = operand(inst, ctx, 3) + r * parameter(inst, SCREEN.out_stride)
                tile = best_tile(estimates, work + SCREEN_MAXIMA, vocab_size)
                logits = exact(inst, operand(inst, ctx, 0), operand(inst, ctx, 1), r, tokens, tile, scratch)
                least = max_lanes(inside(logits, 16 * tile, vocab_size))
                far = reach(operand(inst, ctx, 6) + r * parameter(inst, SCREEN.low_stride),
                            parameter(inst, SCREEN.width), parameter(inst, SCREEN.rank))
            store_f32(work + SCREEN_LEAST, least)
            store_f32(work + SCREEN_REACH, far)
            r = claim(ctx)
        return 0


class Estimated(NamedTuple):
    """A matmul, and addresses of the bounds that tell which of its tiles matter."""

    matmul: Addresses
    estimates: int
    bounds: int
    work: int


def _step(make_matmul, group, n):
    """A tile for a block of n tokens: computed for those that may have their largest logit in it."""
    compute = _alone(make_matmul, group, n)

    @inline
    def step(at, tile, t, tiles, following, gap):
        inst, out, estimates, bounds = at.matmul.inst, at.matmul.out, at.estimates, at.bounds
        scratch, stride, wanted = at.matmul.scratch, parameter(inst, SCREEN.out_stride), 0
        for j in range(n):
            row, offset = at.work + (t + j) * parameter(inst, SCREEN.work_stride), (t + j) * stride + 64 * tile
            estimate = load_f32x16(estimates + offset)
            most = estimate + load_f32x16(bounds + 64 * tile) * splat_f32(load_f32(row + SCREEN_REACH))
            most = inside(most, 16 * tile, parameter(inst, SCREEN.vocab_size))
            if lanes_above(splat_f32(load_f32(row + SCREEN_LEAST)), most) == _ALL:  # NaN is above and below nothing
                store_f32x16(out + offset, estimate)
            else:
                wanted |= 1 << j
        if wanted:
            compute(inst, at.matmul.w, at.matmul.x + t * parameter(inst, SCREEN.x_stride), tile, scratch)
            for j in range(n):
                if wanted >> j & 1:
                    store_f32x16(out + (t + j) * stride + 64 * tile, load_f32x16(scratch + 64 * j))

    return 1, step


def _register_head(name, make_matmul, group):
    screened_tokens = in_blocks(of_heights(lambda n: _step(make_matmul, group, n)))
    whole_chunks = in_chunks(chunk_of_rows(make_matmul, group))

    @kernel(name)
    def run(inst, ctx, tid, n_threads):
        scratch = operand(inst, ctx, 7) + tid * parameter(inst, SCREEN.scratch)
        matmul = Addresses(inst, operand(inst, ctx, 0), operand(inst, ctx, 1), operand(inst, ctx, 2), 0, scratch, 0)
        tokens, tiles = count(ctx, parameter(inst, SCREEN.rows)), parameter(inst, SCREEN.tiles)
        chunk = parameter(inst, SCREEN.chunk)
        if count(ctx, COUNT_SAMPLES) == 0:  # there are no estimates
            whole_chunks(matmul, ctx, tiles, chunk, tokens)
            return 0
        at = Estimated(matmul, operand(inst, ctx, 3), operand(inst, ctx, 4), operand(inst, ctx, 5))
        start = claim(ctx) * chunk
        while start < tiles:
            for tile in range(start, min(start + chunk, tiles)):
                screened_tokens(at, tile, tile + 1, tile, 0, tokens, 1)
            start = claim(ctx) * chunk
        return 0


for _row in TYPES.values():
    for _end, _group in zip(_row.suffixes, _row.groups, strict=False) if _row.simple else ():
        _register_least(f"screen_least_{_end}", matmul_of(_row.name), _group)
        _register_head(f"head_{_end}", matmul_of(_row.name), _group)
