"""Choosing a token from each row of logits for which a sample is listed: bias and penalties, top-k, top-p, min-p, a
sample.

Three instructions. `sample_edit` changes the logits of the tokens that a sample spec's list names. `sample_blocks`
notes the largest of every 64 logits, so that few of them are looked at again, and where top-p is about the whole
vocabulary the sum of the exponentials of each chunk. `sample_choose` sorts the best candidates of a row, cuts and
samples, and puts the model's own logits back. The result is the token's id in the sample. A row belongs to one thread
but for the maxima. Tokens that a mask forbids are -inf in every vector of logits that is read (`logits_at`), and no
sample takes a token of -inf; so single logits are only read where they are allowed.

Operands: 0 logits, 1 work. Parameters: parameters.SAMPLE. Reference: reference/sampling/sample.py; all in NumPy:
sampling.py. Floats of 64 bits go through the same single operations as there, so that tokens are the same.
"""

from __future__ import annotations

from ...abi import (
    COUNT_SAMPLES,
    CTX_OUTPUTS,
    CTX_SAMPLES,
    EDIT_BIAS,
    EDIT_BYTES,
    EDIT_COUNT,
    EDIT_KEPT,
    EDIT_TOKEN,
    SAMPLE_BLOCK,
    SAMPLE_CANDIDATES,
    SAMPLE_CHUNK,
    SAMPLE_EDITS,
    SAMPLE_FREQUENCY,
    SAMPLE_KEY,
    SAMPLE_MASK,
    SAMPLE_MIN_P,
    SAMPLE_N_EDITS,
    SAMPLE_PRESENCE,
    SAMPLE_REPETITION,
    SAMPLE_TEMPERATURE,
    SAMPLE_TOKEN,
    SAMPLE_TOP_K,
    SAMPLE_TOP_P,
    TOKEN_POSITION,
)
from ...parameters import SAMPLE
from ...registry import kernel
from ...vector.instruction import claim, count, inline, operand, parameter, token
from ...vector.lanes import first_lane, max_lanes, splat_f32, sum_lanes, vmax, vmax_or_inf
from ...vector.memory import load_f32, load_f32x16, load_f64, load_i32, load_i64, store_f32, store_i64
from ...vector.scalars import div_f64, div_i64, f64_of, max_f32, narrow, widen
from ...vector.vecmath import exp as exp_lanes
from .sample_candidates import collect
from .sample_cut import choose_of_many
from .sample_numbers import (
    absorb,
    exp,
    gumbel,
    id_of,
    logit_of,
    logits_at,
)

_LOWEST = -3.4028234663852886e38
_INFINITY = float("inf")
_BLOCKS = SAMPLE_CHUNK // SAMPLE_BLOCK


@inline
def sample_spec_of(ctx, r):
    """Address of the sample of row r, or 0."""
    return load_i64(load_i64(ctx + CTX_SAMPLES) + 8 * r)


# -- bias and penalties ------------------------------------------------------------------------------------------------


@inline
def penalised(spec, logit, seen):
    """A logit after the penalties of a token that was generated `seen` times."""
    value, repetition = widen(logit), load_f64(spec + SAMPLE_REPETITION)
    value = div_f64(value, repetition) if value > 0.0 else value * repetition
    if seen > 0:
        value = value - load_f64(spec + SAMPLE_PRESENCE)
    value = value - load_f64(spec + SAMPLE_FREQUENCY) * f64_of(seen)
    return narrow(min(value, -_LOWEST))


@kernel("sample_edit")
def sample_edit(inst, ctx, tid, n_threads):
    """Change the logits of the tokens in each sample spec's list, and keep the old values."""
    r = claim(ctx)
    while r < count(ctx, COUNT_SAMPLES):
        spec, logits = sample_spec_of(ctx, r), operand(inst, ctx, 0) + r * parameter(inst, SAMPLE.logits_stride)
        if spec:
            edit = load_i64(spec + SAMPLE_EDITS)
            for _ in range(load_i64(spec + SAMPLE_N_EDITS)):
                address, seen = logits + 4 * load_i32(edit + EDIT_TOKEN), load_i32(edit + EDIT_COUNT)
                logit = load_f32(address)
                store_f32(edit + EDIT_KEPT, logit)
                logit = logit + load_f32(edit + EDIT_BIAS)
                store_f32(address, penalised(spec, logit, seen) if seen >= 0 else logit)
                edit += EDIT_BYTES
        r = claim(ctx)
    return 0


@inline
def put_back(spec, logits):
    """Undo the edits."""
    edit = load_i64(spec + SAMPLE_EDITS)
    for _ in range(load_i64(spec + SAMPLE_N_EDITS)):
        store_f32(logits + 4 * load_i32(edit + EDIT_TOKEN), load_f32(edit + EDIT_KEPT))
        edit += EDIT_BYTES


# -- maxima and sums ---------------------------------------------------------------------------------------------------


@inline
def sums_wanted(spec, vocab_size):
    """Return whether top-p is about the whole vocabulary: top-k is off, or as large."""
    return (not 0 < load_i64(spec + SAMPLE_TOP_K) < vocab_size and load_f64(spec + SAMPLE_TOP_P) < 1.0
            and load_f64(spec + SAMPLE_TEMPERATURE) > 0.0)


@inline
def largest_of(maxima, n):
    """The largest of n vectors of maxima."""
    v = load_f32x16(maxima)
    for c in range(1, n):
        v = vmax(v, load_f32x16(maxima + 64 * c))
    return max_lanes(v)


@kernel("sample_blocks")
def sample_blocks(inst, ctx, tid, n_threads):
    """The largest of each block of 64 logits (+inf where one is NaN), and the sums of e^(logit - its chunk's largest).
    """
    vocab_size, rows = parameter(inst, SAMPLE.vocab_size), count(ctx, COUNT_SAMPLES)
    chunks = div_i64(vocab_size + SAMPLE_CHUNK - 1, SAMPLE_CHUNK)
    unit = claim(ctx)
    while unit < rows * chunks:
        r = div_i64(unit, chunks)
        chunk, spec = unit - r * chunks, sample_spec_of(ctx, r)
        if spec:
            mask = load_i64(spec + SAMPLE_MASK)
            logits = operand(inst, ctx, 0) + r * parameter(inst, SAMPLE.logits_stride)
            work = operand(inst, ctx, 1) + r * parameter(inst, SAMPLE.work_stride)
            first, maxima = chunk * SAMPLE_CHUNK, work + 64 * chunk
            for k in range(_BLOCKS):
                top = splat_f32(-_INFINITY)
                start = first + k * SAMPLE_BLOCK
                for i in range(start, min(start + SAMPLE_BLOCK, vocab_size), 16):
                    top = vmax_or_inf(top, logits_at(logits, mask, i, vocab_size))
                store_f32(maxima + 4 * k, max_lanes(top))
            if sums_wanted(spec, vocab_size):
                base = splat_f32(max_f32(largest_of(maxima, 1), first_lane(splat_f32(_LOWEST))))
                total = splat_f32(0.0)
                for i in range(first, min(first + SAMPLE_CHUNK, vocab_size), 16):
                    total = total + exp_lanes(logits_at(logits, mask, i, vocab_size) - base)
                store_f32(work + parameter(inst, SAMPLE.sums) + 4 * chunk, sum_lanes(total))
        unit = claim(ctx)
    return 0


# -- the chain ---------------------------------------------------------------------------------------------------------


@inline
def total_weight(spec, work, maxima, heap, n, top, vocab_size):
    """Sum of the weights that top-p is a share of: those of n candidates, or of the whole vocabulary."""
    total = 0.0
    if sums_wanted(spec, vocab_size):
        for c in range(div_i64(vocab_size + SAMPLE_CHUNK - 1, SAMPLE_CHUNK)):
            total = total + widen(load_f32(work + 4 * c)) * exp(widen(largest_of(maxima + 64 * c, 1)) - top)
    else:
        for j in range(n):
            total = total + exp(widen(logit_of(load_i64(heap + 8 * j))) - top)
    return total


@inline
def n_kept(spec, heap, n, top, total, all_known):
    """Return how many of n sorted candidates top-p and min-p keep; 0 if more candidates are needed to tell."""
    top_p, min_p = load_f64(spec + SAMPLE_TOP_P), load_f64(spec + SAMPLE_MIN_P)
    reached = 0.0
    for j in range(n):
        weight = exp(widen(logit_of(load_i64(heap + 8 * j))) - top)
        if weight < min_p:
            return j
        reached = reached + weight
        if top_p < 1.0 and reached >= top_p * total:
            return j + 1
    return n if all_known else 0


@inline
def sampled(spec, heap, n, top, position):
    """The one of n candidates with the largest logit / temperature + Gumbel number; the lowest id among equals."""
    state = absorb(load_i64(spec + SAMPLE_KEY), position)
    best, chosen = -_INFINITY, id_of(load_i64(heap))
    for j in range(n):
        key = load_i64(heap + 8 * j)
        score = div_f64(widen(logit_of(key)) - top, load_f64(spec + SAMPLE_TEMPERATURE))
        score = score + gumbel(absorb(state, id_of(key)))
        if score > best or (score == best and id_of(key) < chosen):
            best, chosen = score, id_of(key)
    return chosen


@inline
def choose(spec, logits, work, sums, heap, vocab_size, position):
    """The token's id; -1 if a logit is NaN or infinite, or none is left."""
    largest = largest_of(work, div_i64(vocab_size + SAMPLE_CHUNK - 1, SAMPLE_CHUNK))
    if not (largest < _INFINITY and largest > -_INFINITY):
        return -1
    temperature, top_k = load_f64(spec + SAMPLE_TEMPERATURE), load_i64(spec + SAMPLE_TOP_K)
    mask = load_i64(spec + SAMPLE_MASK)
    wanted = top_k if 0 < top_k < vocab_size else vocab_size
    n = 1 if temperature == 0.0 else min(wanted, SAMPLE_CANDIDATES)
    collect(logits, mask, work, vocab_size, heap, n)
    if temperature == 0.0:
        return id_of(load_i64(heap))
    top = widen(logit_of(load_i64(heap)))
    total = total_weight(spec, sums, work, heap, n, top, vocab_size) if load_f64(spec + SAMPLE_TOP_P) < 1.0 else 0.0
    if wanted in (n, vocab_size):
        kept = n_kept(spec, heap, n, top, total, n == wanted)
        if kept:
            return sampled(spec, heap, kept, top, position)
    bins = heap + 8 * SAMPLE_CANDIDATES
    return choose_of_many(spec, logits, mask, work, bins, vocab_size, top, total, position)


@kernel("sample_choose")
def sample_choose(inst, ctx, tid, n_threads):
    """Sort, cut and sample; the id of the token goes to the sample, and the logits are the model's own again."""
    r = claim(ctx)
    while r < count(ctx, COUNT_SAMPLES):
        spec, logits = sample_spec_of(ctx, r), operand(inst, ctx, 0) + r * parameter(inst, SAMPLE.logits_stride)
        if spec:
            work = operand(inst, ctx, 1) + r * parameter(inst, SAMPLE.work_stride)
            last = load_i64(load_i64(ctx + CTX_OUTPUTS) + 8 * r)
            store_i64(spec + SAMPLE_TOKEN, choose(
                spec, logits, work, work + parameter(inst, SAMPLE.sums), work + parameter(inst, SAMPLE.candidates),
                parameter(inst, SAMPLE.vocab_size), token(ctx, last, TOKEN_POSITION) + 1))
            put_back(spec, logits)
        r = claim(ctx)
    return 0
