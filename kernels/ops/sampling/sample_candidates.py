"""The best candidates of a row of logits, collected in a heap whose root is the worst."""

from __future__ import annotations

from ...abi import SAMPLE_BLOCK, SAMPLE_CHUNK
from ...vector.instruction import inline
from ...vector.lanes import lanes_at_least
from ...vector.memory import load_f32x16, load_i64, store_i64
from ...vector.scalars import div_i64, trailing_zeros
from .sample_numbers import LOWEST_ORDER, candidate, lanes_from, logit_of, logit_of_order

_NO_CANDIDATE = (LOWEST_ORDER - 1) << 32
"""Fills the places that no candidate takes: a logit of -inf, whose weight is 0."""


@inline
def replace_root(heap, n, key):
    """Put a candidate in the place of the worst of n."""
    i, child = 0, 1
    while child < n:
        other = load_i64(heap + 8 * child)
        if child + 1 < n and load_i64(heap + 8 * child + 8) < other:
            child += 1
            other = load_i64(heap + 8 * child)
        if other >= key:
            break
        store_i64(heap + 8 * i, other)
        i, child = child, 2 * child + 1
    store_i64(heap + 8 * i, key)


@inline
def collect_block(logits, mask, first, vocab_size, heap, n, threshold):
    """Put logits better than the worst of n candidates among them, from one block; returns the worst one's logit."""
    for i in range(first, min(first + SAMPLE_BLOCK, vocab_size), 16):
        lanes = lanes_from(logits, mask, i, vocab_size, threshold)
        while lanes:
            at = i + trailing_zeros(lanes)
            lanes = lanes & (lanes - 1)
            key = candidate(logits, at)
            if key > load_i64(heap):
                replace_root(heap, n, key)
                if load_i64(heap) != _NO_CANDIDATE:
                    threshold = logit_of(load_i64(heap))
    return threshold


@inline
def collect(logits, mask, maxima, vocab_size, heap, n):
    """Leave the n best candidates at `heap`, best first."""
    for j in range(n):
        store_i64(heap + 8 * j, _NO_CANDIDATE)
    threshold = logit_of_order(LOWEST_ORDER)
    for chunk in range(div_i64(vocab_size + SAMPLE_CHUNK - 1, SAMPLE_CHUNK)):
        blocks = lanes_at_least(load_f32x16(maxima + 64 * chunk), threshold)
        while blocks:
            first = chunk * SAMPLE_CHUNK + trailing_zeros(blocks) * SAMPLE_BLOCK
            blocks = blocks & (blocks - 1)
            threshold = collect_block(logits, mask, first, vocab_size, heap, n, threshold)
    for end in range(n - 1, 0, -1):
        worst, last = load_i64(heap), load_i64(heap + 8 * end)
        replace_root(heap, end, last)
        store_i64(heap + 8 * end, worst)
