"""Sampling from more candidates than are sorted: the cut of top-k, top-p and min-p is found by counting.

A cut is the order-preserving bits of the last kept logit, and the number of its equals that are kept, the lowest ids
first. Tokens are counted, and their weights summed, byte by byte of these bits (a radix selection): four passes over
the tokens that can be kept, most blocks of which are skipped by their maxima. The sample then computes logarithms only
for the few tokens whose random bits can win.
"""

from __future__ import annotations

from ...abi import SAMPLE_BLOCK, SAMPLE_KEY, SAMPLE_MIN_P, SAMPLE_TEMPERATURE, SAMPLE_TOP_K, SAMPLE_TOP_P
from ...vector.instruction import inline, outlined
from ...vector.memory import load_f32, load_f64, load_i64, store_f64, store_i64
from ...vector.scalars import bits_of_f64, div_f64, div_i64, f64_of, max_f32, narrow, shift_right, trailing_zeros, widen
from .sample_numbers import LOWEST_ORDER, absorb, exp, gumbel, lanes_from, log, logit_of_order, order_of

_INFINITY = float("inf")
_EVERY = 1 << 40
"""More tokens than there are."""
_BASE = -(1 << 31)
"""Below all order-preserving bits."""
_MAX_GUMBEL = 37.0
"""Above -ln(2^-53), the largest Gumbel number that there is."""


@inline
def tally(logits, mask, maxima, bins, vocab_size, top, least, limit, limit_ties, prefix, shift):
    """Count the tokens, and add up their weights, by the byte of their bits after a prefix.

    Left out are logits below `least` and those after the limit, which is a cut.
    """
    for b in range(256):
        store_i64(bins + 16 * b, 0)
        store_f64(bins + 16 * b + 8, 0.0)
    equals = 0
    for block in range(div_i64(vocab_size + SAMPLE_BLOCK - 1, SAMPLE_BLOCK)):
        if load_f32(maxima + 4 * block) >= least:
            first = SAMPLE_BLOCK * block
            for i in range(first, min(first + SAMPLE_BLOCK, vocab_size), 16):
                lanes = lanes_from(logits, mask, i, vocab_size, least)
                while lanes:
                    at = i + trailing_zeros(lanes)
                    lanes = lanes & (lanes - 1)
                    order = order_of(logits, at)
                    equals += 1 if order == limit else 0
                    inside = order > limit or (order == limit and equals <= limit_ties)
                    bits = order - _BASE
                    if inside and bits >> (shift + 8) == prefix:
                        slot = bins + 16 * ((bits >> shift) & 255)
                        store_i64(slot, load_i64(slot) + 1)
                        store_f64(slot + 8, load_f64(slot + 8) + exp(widen(load_f32(logits + 4 * at)) - top))


@outlined
def cut_at(logits, mask, maxima, bins, vocab_size, top, least, limit, limit_ties, count, share, total):
    """The cut after the first token with which this many, or this share of the total, is reached: (bits, equals kept).

    A total below 0 stands for that of the tokens before the limit. If there are too few tokens nothing is cut.
    """
    prefix, n, reached, mass, b = 0, 0, 0.0, share * total, 0
    for level in range(4):
        tally(logits, mask, maxima, bins, vocab_size, top, least, limit, limit_ties, prefix, 24 - 8 * level)
        if mass < 0.0:
            total = 0.0
            for slot in range(256):
                total = total + load_f64(bins + 16 * slot + 8)
            mass = share * total
        b = 255
        while b > 0 and n + load_i64(bins + 16 * b) < count and reached + load_f64(bins + 16 * b + 8) < mass:
            n += load_i64(bins + 16 * b)
            reached = reached + load_f64(bins + 16 * b + 8)
            b -= 1
        prefix = prefix << 8 | b
    if prefix + _BASE < LOWEST_ORDER:
        return LOWEST_ORDER, _EVERY
    equals, weight = load_i64(bins + 16 * b), exp(widen(logit_of_order(prefix + _BASE)) - top)
    kept = 1
    while kept < equals and n + kept < count and reached + weight * f64_of(kept) < mass:
        kept += 1
    return prefix + _BASE, kept


@inline
def least_likely(top, min_p):
    """The bits of the smallest logit whose weight is at least min-p."""
    low, high = LOWEST_ORDER, 0x7F800000
    while low < high:
        middle = (low + high) >> 1
        logit = widen(logit_of_order(middle))
        if logit >= top or exp(logit - top) >= min_p:
            high = middle
        else:
            low = middle + 1
    return low


@inline
def surely_left_out(top, top_p, total, vocab_size):
    """A logit below which all tokens together weigh less than the part that top-p leaves out."""
    weight = div_f64(0.9 * (1.0 - top_p) * total, f64_of(vocab_size))
    if weight < 1e-300:
        return logit_of_order(LOWEST_ORDER)
    bound = top + log(weight)
    return max_f32(narrow(bound - 1e-6 * abs(bound)), logit_of_order(LOWEST_ORDER))


@inline
def sampled_of_all(spec, logits, mask, maxima, vocab_size, top, cut, ties, position):
    """The token before the cut with the largest logit / temperature + Gumbel number; the lowest id among equals."""
    state, temperature = absorb(load_i64(spec + SAMPLE_KEY), position), load_f64(spec + SAMPLE_TEMPERATURE)
    least, best, chosen, equals = logit_of_order(cut), -_INFINITY, vocab_size, 0
    for block in range(div_i64(vocab_size + SAMPLE_BLOCK - 1, SAMPLE_BLOCK)):
        most = load_f32(maxima + 4 * block)
        if most >= least and div_f64(widen(most) - top, temperature) + _MAX_GUMBEL >= best:
            first = SAMPLE_BLOCK * block
            for i in range(first, min(first + SAMPLE_BLOCK, vocab_size), 16):
                lanes = lanes_from(logits, mask, i, vocab_size, least)
                while lanes:
                    at = i + trailing_zeros(lanes)
                    lanes = lanes & (lanes - 1)
                    equals += 1 if order_of(logits, at) == cut else 0
                    if equals <= ties or order_of(logits, at) > cut:
                        bits = absorb(state, at)
                        score = div_f64(widen(load_f32(logits + 4 * at)) - top, temperature)
                        # -ln u >= 1 - u, at least 2^-53 times the integer whose highest bit is looked at here
                        rest = bits_of_f64(f64_of((1 << 52) - shift_right(bits, 12))) >> 52
                        if score + 0.69314719 * f64_of(53 + 1023 - rest) >= best:
                            score = score + gumbel(bits)
                            if score > best or (score == best and at < chosen):
                                best, chosen = score, at
    return chosen


@outlined
def choose_of_many(spec, logits, mask, maxima, bins, vocab_size, top, total, position):
    """The token that is sampled where any number may be kept; `total` is the weight of the whole vocabulary."""
    top_k, top_p, min_p = load_i64(spec + SAMPLE_TOP_K), load_f64(spec + SAMPLE_TOP_P), load_f64(spec + SAMPLE_MIN_P)
    cut, ties, least = LOWEST_ORDER, _EVERY, logit_of_order(LOWEST_ORDER)
    if 0 < top_k < vocab_size:
        cut, ties = cut_at(logits, mask, maxima, bins, vocab_size, top, least, cut, ties, top_k, _INFINITY, 1.0)
        least, total = logit_of_order(cut), -1.0
    elif top_p < 1.0:
        least = surely_left_out(top, top_p, total, vocab_size)
    if top_p < 1.0:
        cut, ties = cut_at(logits, mask, maxima, bins, vocab_size, top, least, cut, ties, _EVERY, top_p, total)
    if min_p > 0.0:
        likely = least_likely(top, min_p)
        if likely > cut:
            cut, ties = likely, _EVERY
    return sampled_of_all(spec, logits, mask, maxima, vocab_size, top, cut, ties, position)
