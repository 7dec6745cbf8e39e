"""Several steps of decoding in one forward pass: the token sampled from each row becomes the next one of its sequence.

Between two passes Python describes the next one and turns tokens into text, with caches that the weights have emptied:
a tenth of the time of a small model's token. If Python is not needed in between, the pass starts its next step itself.
"""

from __future__ import annotations

from ..abi import (
    BLOCK_TOKENS,
    COUNT_TOKENS,
    CTX_CHOSEN,
    CTX_SAMPLES,
    CTX_SEQUENCES,
    CTX_STEPS,
    CTX_TOKENS,
    EDIT_BIAS,
    EDIT_BYTES,
    EDIT_COUNT,
    EDIT_TOKEN,
    MAX_STEPS,
    SAMPLE_EDITS,
    SAMPLE_ENDS,
    SAMPLE_FREQUENCY,
    SAMPLE_MASK,
    SAMPLE_N_EDITS,
    SAMPLE_N_ENDS,
    SAMPLE_PRESENCE,
    SAMPLE_REPETITION,
    SAMPLE_TOKEN,
    SEQUENCE_BLOCKS,
    SEQUENCE_BYTES,
    TOKEN_BASE,
    TOKEN_BYTES,
    TOKEN_ID,
    TOKEN_POSITION,
    TOKEN_ROW,
    TOKEN_SLOT,
)
from ..vector.instruction import count, inline
from ..vector.memory import load_f64, load_i32, load_i64, store_i32, store_i64


@inline
def sampled_token(ctx, r):
    """The token that was sampled for row r; -1 if none was, where it ends its text, or where a mask is for one token.
    """
    spec = load_i64(load_i64(ctx + CTX_SAMPLES) + 8 * r)
    token, ends = load_i64(spec + SAMPLE_TOKEN), load_i64(spec + SAMPLE_ENDS)
    if load_i64(spec + SAMPLE_MASK):
        return -1
    for i in range(load_i64(spec + SAMPLE_N_ENDS)):
        if load_i64(ends + 8 * i) == token:
            return -1
    return token


@inline
def note(spec, token):
    """Count a generated token among those that have a penalty, as `Sampler.accept` does."""
    if load_f64(spec + SAMPLE_REPETITION) == 1.0 and load_f64(spec + SAMPLE_PRESENCE) == 0.0 \
            and load_f64(spec + SAMPLE_FREQUENCY) == 0.0:
        return
    edit, n = load_i64(spec + SAMPLE_EDITS), load_i64(spec + SAMPLE_N_EDITS)
    end = edit + EDIT_BYTES * n
    while edit < end and load_i32(edit + EDIT_TOKEN) != token:
        edit += EDIT_BYTES
    if edit == end:
        store_i32(edit + EDIT_TOKEN, token)
        store_i32(edit + EDIT_COUNT, 0)
        store_i32(edit + EDIT_BIAS, 0)
        store_i64(spec + SAMPLE_N_EDITS, n + 1)
    store_i32(edit + EDIT_COUNT, max(load_i32(edit + EDIT_COUNT), 0) + 1)


@inline
def go_on(ctx, r, token, left):
    """Describe the next step of sequence r, whose token and row of logits have that number too."""
    note(load_i64(load_i64(ctx + CTX_SAMPLES) + 8 * r), token)
    store_i64(load_i64(ctx + CTX_CHOSEN) + 8 * (MAX_STEPS * r + left), token)
    entry = load_i64(ctx + CTX_TOKENS) + TOKEN_BYTES * r
    sequence = load_i64(ctx + CTX_SEQUENCES) + SEQUENCE_BYTES * r
    row = load_i64(entry + TOKEN_ROW) + 1
    store_i64(entry + TOKEN_ID, token)
    store_i64(entry + TOKEN_POSITION, load_i64(entry + TOKEN_POSITION) + 1)
    store_i64(entry + TOKEN_ROW, row)
    store_i64(entry + TOKEN_BASE, row)
    for table in range(2):
        block = load_i32(load_i64(sequence + SEQUENCE_BLOCKS + 8 * table) + 4 * (row // BLOCK_TOKENS))
        store_i32(entry + TOKEN_SLOT + 4 * table, block * BLOCK_TOKENS + row % BLOCK_TOKENS)


@inline
def take_step(ctx):
    """Describe one more step if one is left and each sequence has a token for it; called by one thread."""
    left, sequences = load_i64(ctx + CTX_STEPS), count(ctx, COUNT_TOKENS)
    if left <= 0:
        return False
    for r in range(sequences):
        if sampled_token(ctx, r) < 0:
            return False
    store_i64(ctx + CTX_STEPS, left - 1)
    for r in range(sequences):
        go_on(ctx, r, sampled_token(ctx, r), left)
    return True
